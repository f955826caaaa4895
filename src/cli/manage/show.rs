//! `get`: what a gateway has, as `loxicmd` prints it: tables, or JSON indented by four blanks.

use clap::{Args, Subcommand, ValueEnum};
use serde::Serialize as _;
use serde_json::Value;

use super::Ended;
use super::client::{Client, ServerArgs};
use super::create::{mode_name, selection_name};

/// Keys that are asked for at once.
const PAGE: usize = 100_000;

/// What `get` is told.
#[derive(Clone, Debug, Args)]
pub(in crate::cli) struct GetArgs {
    #[command(subcommand)]
    what: What,
    /// Form of the output.
    #[arg(short, long, value_enum, default_value_t = Form::Table, global = true)]
    output: Form,
    #[command(flatten)]
    server: ServerArgs,
}

#[derive(Clone, Debug, Subcommand)]
enum What {
    /// Load-balancer rules.
    #[command(visible_aliases = ["loadbalancer", "loadbalancers", "lbs"])]
    Lb {
        /// Only rules of this name.
        #[arg(long = "servName", value_name = "NAME")]
        name: Option<String>,
    },
    /// The keys that an endpoint's engine has announced.
    Kvinventory {
        /// Number of the rule.
        #[arg(long)]
        service_id: u32,
        /// Place of the endpoint in the rule.
        #[arg(long)]
        ep_idx: u32,
    },
    /// Hosts of engines.
    #[command(visible_aliases = ["endpoint", "endpoints"])]
    Ep,
    /// What could take requests now; exit code 7 where nothing could.
    Ready,
    /// The gateway's version.
    #[command(visible_alias = "version")]
    Lbversion,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Form {
    /// A table.
    #[value(name = "table")]
    Table,
    /// A table with every endpoint.
    Wide,
    /// What the gateway answers.
    Json,
}

pub(super) fn run(args: &GetArgs) -> Result<String, Ended> {
    let client = Client::new(&args.server)?;
    match &args.what {
        What::Lb { name } => {
            let mut answer = client.ask("GET", "/config/loadbalancer/all", None)?;
            if let (Some(name), Some(rules)) = (name, answer["lbAttr"].as_array_mut()) {
                rules.retain(|rule| rule["serviceArguments"]["name"] == name.as_str());
            }
            Ok(match args.output {
                Form::Json => pretty(&answer),
                Form::Table => rules(&answer),
                Form::Wide => endpoints_of_rules(&answer),
            })
        }
        What::Kvinventory { service_id, ep_idx } => inventory(&client, *service_id, *ep_idx, args.output),
        What::Ep => {
            let answer = client.ask("GET", "/config/endpoint/all", None)?;
            Ok(if args.output == Form::Json { pretty(&answer) } else { hosts(&answer) })
        }
        What::Ready => ready(&client, args.output),
        What::Lbversion => {
            let answer = client.ask("GET", "/version", None)?;
            Ok(match args.output {
                Form::Json => pretty(&answer),
                _ => table(&["VERSION", "BUILD"], &[vec![text(&answer["version"]), text(&answer["buildInfo"])]]),
            })
        }
    }
}

/// JSON as the reference's client prints it.
pub(super) fn pretty(value: &Value) -> String {
    let mut bytes = Vec::new();
    let form = serde_json::ser::PrettyFormatter::with_indent(b"    ");
    // Writing a value to memory cannot fail.
    let _ = value.serialize(&mut serde_json::Serializer::with_formatter(&mut bytes, form));
    String::from_utf8_lossy(&bytes).into_owned()
}

/// A value as people read it.
fn text(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Null => String::new(),
        other => other.to_string(),
    }
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_default()
}

/// A table with bars, its columns as wide as their widest cell.
pub(super) fn table(head: &[&str], rows: &[Vec<String>]) -> String {
    let width = |column: usize| {
        let cells = rows.iter().map(|row| row.get(column).map_or(0, |cell| cell.chars().count()));
        cells.chain([head[column].chars().count()]).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..head.len()).map(width).collect();
    let line = |cells: &mut dyn Iterator<Item = &str>| {
        let cells = cells.zip(&widths).map(|(cell, width)| format!(" {cell:^width$} "));
        format!("|{}|", cells.collect::<Vec<_>>().join("|"))
    };
    let rule = widths.iter().map(|width| "-".repeat(width + 2)).collect::<Vec<_>>().join("|");
    let mut lines = vec![line(&mut head.iter().copied()), format!("|{rule}|")];
    lines.extend(rows.iter().map(|row| line(&mut row.iter().map(String::as_str))));
    lines.join("\n")
}

/// Rules in the reference's order: by address, port and protocol.
fn sorted(answer: &Value) -> Vec<&Value> {
    let mut rules: Vec<&Value> = answer["lbAttr"].as_array().into_iter().flatten().collect();
    rules.sort_by_key(|rule| {
        let service = &rule["serviceArguments"];
        (text(&service["externalIP"]), format!("{:05}", number(&service["port"])), text(&service["protocol"]))
    });
    rules
}

fn protocol(service: &Value) -> String {
    let security = match number(&service["security"]) {
        1 => ":https",
        2 => ":e2ehttps",
        _ => "",
    };
    format!("{}{security}", text(&service["protocol"]))
}

fn mode(service: &Value) -> String {
    let on = |name: &str| service[name] == true;
    let ppv2 = if on("proxyprotocolv2") { ":ppv2" } else { "" };
    let egress = if on("egress") { ":egress" } else { "" };
    format!("{}{ppv2}{egress}", mode_name(number(&service["mode"])))
}

fn rules(answer: &Value) -> String {
    let head = [
        "EXT IP",
        "PORT",
        "PROTO",
        "NAME",
        "MARK",
        "SEL",
        "MODE",
        "# OF ENDPOINTS",
        "TIMEOUT",
        "MONITOR",
        "CONN LIMIT",
        "FC QUEUE",
    ];
    let row = |rule: &Value| {
        let service = &rule["serviceArguments"];
        vec![
            text(&service["externalIP"]),
            text(&service["port"]),
            protocol(service),
            text(&service["name"]),
            text(&service["block"]),
            selection_name(number(&service["sel"])).to_owned(),
            mode(service),
            rule["endpoints"].as_array().map_or(0, Vec::len).to_string(),
            number(&service["inactiveTimeOut"]).to_string(),
            if service["monitor"] == true { "On" } else { "Off" }.to_owned(),
            number(&service["connectionLimit"]).to_string(),
            number(&service["fc_max_queue_depth"]).to_string(),
        ]
    };
    table(&head, &sorted(answer).into_iter().map(row).collect::<Vec<_>>())
}

fn endpoints_of_rules(answer: &Value) -> String {
    let head = [
        "EXT IP", "SEC IPS", "SOURCES", "HOST", "PORT", "PROTO", "NAME", "MARK", "SEL", "MODE", "ENDPOINT", "EPORT",
        "WEIGHT", "STATE", "COUNTERS", "NOTE",
    ];
    let mut rows = Vec::new();
    for rule in sorted(answer) {
        let service = &rule["serviceArguments"];
        let notes = service["warnings"].as_array().into_iter().flatten().map(text).collect::<Vec<_>>().join("; ");
        for endpoint in rule["endpoints"].as_array().into_iter().flatten() {
            rows.push(vec![
                text(&service["externalIP"]),
                String::new(),
                String::new(),
                text(&service["host"]),
                text(&service["port"]),
                protocol(service),
                text(&service["name"]),
                text(&service["block"]),
                selection_name(number(&service["sel"])).to_owned(),
                mode(service),
                text(&endpoint["endpointIP"]),
                text(&endpoint["targetPort"]),
                text(&endpoint["weight"]),
                // Every endpoint is probed, whatever the rule's monitor says.
                text(&endpoint["state"]),
                text(&endpoint["counter"]),
                notes.clone(),
            ]);
        }
    }
    table(&head, &rows)
}

fn hosts(answer: &Value) -> String {
    let head = ["HOST", "NAME", "PTYPE", "PORT", "DURATION", "RETRIES", "MINDELAY", "AVGDELAY", "MAXDELAY", "STATE"];
    let row = |host: &Value| {
        let columns = [
            "hostName",
            "name",
            "probeType",
            "probePort",
            "probeDuration",
            "inactiveReTries",
            "minDelay",
            "avgDelay",
            "maxDelay",
            "currState",
        ];
        columns.map(|name| text(&host[name])).to_vec()
    };
    table(&head, &answer["Attr"].as_array().into_iter().flatten().map(row).collect::<Vec<_>>())
}

/// An inventory, page by page.
fn inventory(client: &Client, service: u32, endpoint: u32, form: Form) -> Result<String, Ended> {
    let mut cursor = String::new();
    let mut blocks = Vec::new();
    let mut whole: Value;
    loop {
        let path = format!("/config/ai/kv/inventory?service_id={service}&ep_idx={endpoint}&limit={PAGE}{cursor}");
        whole = client.ask("GET", &path, None)?;
        if let Some(page) = whole["blocks"].as_array_mut() {
            blocks.append(page);
        }
        match whole["next_cursor"].as_str() {
            Some(next) => cursor = format!("&cursor={next}"),
            None => break,
        }
    }
    if form == Form::Json {
        whole["blocks"] = Value::Array(blocks);
        return Ok(pretty(&whole));
    }
    let head = format!(
        "service_id: {service}, ep_idx: {endpoint}, hash_algo: {}, total: {}",
        text(&whole["hash_algo"]),
        blocks.len()
    );
    let rows: Vec<Vec<String>> =
        blocks.iter().map(|block| vec![text(&block["block_idx"]), text(&block["hash_uint64"])]).collect();
    Ok(format!("{head}\n{}", table(&["BLOCK IDX", "HASH"], &rows)))
}

fn ready(client: &Client, form: Form) -> Result<String, Ended> {
    let answer = client.ask("GET", "/status/ready", None)?;
    let head = ["SERVICE", "NAME", "LISTEN", "READY", "ENDPOINTS", "USABLE", "REASON"];
    let row = |rule: &Value| {
        ["service_id", "name", "listen", "ready", "endpoints", "usable_endpoints", "reason"]
            .map(|name| text(&rule[name]))
            .to_vec()
    };
    let shown = match form {
        Form::Json => pretty(&answer),
        _ => {
            // Rules of the last run that are not in force yet have neither number nor endpoints here.
            let waits = |rule: &Value| {
                let reason = format!("waits: {}", text(&rule["why"]));
                ["-".into(), String::new(), text(&rule["rule"]), "false".into(), "0".into(), "0".into(), reason]
                    .to_vec()
            };
            let waiting = answer["rules_kept"]["waiting"].as_array().into_iter().flatten().map(waits);
            let rules = answer["rules"].as_array().into_iter().flatten().map(row);
            table(&head, &rules.chain(waiting).collect::<Vec<_>>())
        }
    };
    if answer["ready"] == true {
        return Ok(shown);
    }
    println!("{shown}");
    Err(Ended::Failed("not ready: no rule has a usable endpoint".to_owned()))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn rules_are_shown_in_columns_sorted_by_address_and_port() {
        let rule = |ip: &str, port: u16| {
            json!({"serviceArguments": {"externalIP": ip, "port": port, "protocol": "tcp", "sel": 0, "mode": 4,
                "block": 0, "name": "n", "monitor": true, "warnings": ["address not on host"]},
                "endpoints": [{"endpointIP": "10.0.0.1", "targetPort": 8000, "weight": 1, "state": "active", "counter": ""}]})
        };
        let answer = json!({"lbAttr": [rule("10.0.0.2", 9), rule("10.0.0.1", 8080), rule("10.0.0.1", 99)]});
        let shown = rules(&answer);
        let lines: Vec<&str> = shown.lines().collect();
        let cells = |line: &str| line.split('|').map(|cell| cell.trim().to_owned()).collect::<Vec<_>>();
        assert_eq!(cells(lines[0])[1..4], ["EXT IP", "PORT", "PROTO"]);
        assert_eq!(cells(lines[2])[1..11], ["10.0.0.1", "99", "tcp", "n", "0", "rr", "fullproxy", "1", "0", "On"]);
        assert_eq!(cells(lines[4])[1], "10.0.0.2");
        let wide = endpoints_of_rules(&answer);
        assert!(wide.lines().nth(2).is_some_and(|line| line.contains("address not on host")), "{wide}");
        assert!(pretty(&answer).starts_with("{\n    \"lbAttr\": [\n        {"));
    }
}
