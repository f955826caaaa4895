//! Ports of rules as `loxicmd` writes them: `--tcp=8080-8089:80-89`, several behind commas.

use clap::Args;

use super::Ended;

/// The ports of a rule, by protocol.
#[derive(Clone, Debug, Args)]
pub(super) struct Ports {
    /// PORT[-LAST]:TARGET[-LAST], separated by commas.
    #[arg(long, value_delimiter = ',', value_name = "PORT:TARGET")]
    tcp: Vec<String>,
    /// As --tcp; kvlane refuses it.
    #[arg(long, value_delimiter = ',', value_name = "PORT:TARGET")]
    udp: Vec<String>,
    /// As --tcp; kvlane refuses it.
    #[arg(long, value_delimiter = ',', value_name = "PORT:TARGET")]
    sctp: Vec<String>,
    /// Without ports; kvlane refuses it.
    #[arg(long)]
    icmp: bool,
}

/// One of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Port {
    pub(super) protocol: &'static str,
    pub(super) first: u16,
    /// The last of a range; 0 = none.
    pub(super) last: u16,
    /// The port of the endpoints; 0 where none is given.
    pub(super) target: u16,
}

/// Each port, in the order tcp, udp, sctp, icmp.
pub(super) fn each_port(ports: &Ports) -> Result<Vec<Port>, Ended> {
    let mut all = Vec::new();
    for (protocol, texts) in [("tcp", &ports.tcp), ("udp", &ports.udp), ("sctp", &ports.sctp)] {
        for text in texts {
            all.push(parse(protocol, text).ok_or_else(|| {
                Ended::Usage(format!("--{protocol} {text}: expected PORT[-LAST]:TARGET, such as 8080:8000"))
            })?);
        }
    }
    if ports.icmp {
        all.push(Port { protocol: "icmp", first: 0, last: 0, target: 0 });
    }
    Ok(all)
}

fn parse(protocol: &'static str, text: &str) -> Option<Port> {
    let (service, target) = text.split_once(':').unwrap_or((text, ""));
    let (first, last) = service.split_once('-').unwrap_or((service, ""));
    let (target, _) = target.split_once('-').unwrap_or((target, ""));
    let number = |text: &str| if text.is_empty() { Some(0) } else { text.parse().ok() };
    let first = first.parse().ok()?;
    Some(Port { protocol, first, last: number(last)?, target: number(target)? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_and_ranges_are_read() {
        let port = |first, last, target| Some(Port { protocol: "tcp", first, last, target });
        for (text, expected) in [
            ("8080:8000", port(8080, 0, 8000)),
            ("8080", port(8080, 0, 0)),
            ("8080-8089:80-89", port(8080, 8089, 80)),
            ("x:1", None),
            ("70000:1", None),
            ("", None),
        ] {
            assert_eq!(parse("tcp", text), expected, "{text}");
        }
    }
}
