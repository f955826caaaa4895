//! SGLang: both legs are sent at once and meet in a room of the prefill engine's bootstrap server. The room chooses the
//! rank that computes the prompt: room modulo ranks.

use std::net::IpAddr;

use super::LegError;
use crate::ids::Rank;
use crate::prompt::{Api, Splice};

/// Bytes of a list of prompts that are looked through for its length. A longer one is refused.
pub const LIST_BYTES_MAX: usize = 1024 * 1024;

/// Where the legs of one request meet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Meeting {
    /// Host of the prefill engine.
    pub host: IpAddr,
    /// Port of its bootstrap server.
    pub port: u16,
    /// The room of the first prompt.
    pub room: u64,
    /// The rank that computes it, where the engine has several; the room names it too.
    pub rank: Option<Rank>,
    /// Ranks of the engine.
    pub ranks: u8,
}

/// A room from random bits, which names the rank: positive, with room for a batch behind it.
#[must_use]
pub fn room(random: u64, rank: Option<Rank>, ranks: u8) -> u64 {
    let room = random >> 2;
    let ranks = u64::from(ranks.max(1));
    match rank {
        Some(Rank(rank)) => room - room % ranks + u64::from(rank) % ranks,
        None => room,
    }
}

/// Makes both legs of a body, which are the same but for the rank that the decode leg names.
///
/// # Errors
/// A list of prompts that is too long; the limits of splicing.
pub fn both<'a>(body: Splice<'a>, api: Api, at: Meeting) -> Result<(Splice<'a>, Splice<'a>), LegError> {
    let mut prefill = body;
    let prompts = prompts(&prefill, api)?;
    let host = match at.host {
        IpAddr::V4(ip) => format!("\"{ip}\""),
        IpAddr::V6(ip) => format!("\"[{ip}]\""),
    };
    let step = u64::from(at.ranks.max(1));
    let listed = |value: &dyn Fn(u64) -> String| match prompts {
        None => value(0),
        Some(count) => {
            let items: Vec<String> = (0..count as u64).map(value).collect();
            format!("[{}]", items.join(","))
        }
    };
    prefill.set_member("bootstrap_host", listed(&|_| host.clone()).as_bytes())?;
    prefill.set_member("bootstrap_port", listed(&|_| at.port.to_string()).as_bytes())?;
    // Every prompt of a batch has a room of its own, all of the same rank.
    prefill.set_member("bootstrap_room", listed(&|place| (at.room + place * step).to_string()).as_bytes())?;
    let mut decode = prefill.clone();
    if let Some(Rank(rank)) = at.rank.filter(|_| at.ranks > 1) {
        decode.set_member("disagg_prefill_dp_rank", rank.to_string().as_bytes())?;
    }
    Ok((prefill, decode))
}

/// How many prompts the body lists; none where it has one.
fn prompts(body: &Splice<'_>, api: Api) -> Result<Option<usize>, LegError> {
    let names: &[&str] = match api {
        Api::Generate => &["text", "input_ids"],
        Api::Completions => &["prompt"],
        _ => {
            let copies = body.value("n").and_then(|n| std::str::from_utf8(n).ok()?.parse::<usize>().ok());
            return Ok(copies.filter(|&copies| (2..=COPIES_MAX).contains(&copies)));
        }
    };
    let Some(list) = names.iter().find_map(|name| body.value(name)).filter(|value| value.starts_with(b"[")) else {
        return Ok(None);
    };
    let first = list[1..].iter().find(|byte| !byte.is_ascii_whitespace());
    if !matches!(first, Some(b'"' | b'[')) {
        // One prompt in ids.
        return Ok(None);
    }
    if list.len() > LIST_BYTES_MAX {
        return Err(LegError::LongList);
    }
    Ok(Some(count_items(list)))
}

/// Answers that a chat may ask for at once.
const COPIES_MAX: usize = 1024;

/// Items of a JSON list that is known to be well-formed and not empty.
fn count_items(list: &[u8]) -> usize {
    let (mut depth, mut items, mut in_text, mut escaped) = (0_u32, 1, false, false);
    for &byte in list {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = in_text,
            b'"' => in_text = !in_text,
            _ if in_text => {}
            b'[' | b'{' => depth += 1,
            b']' | b'}' => depth -= 1,
            b',' if depth == 1 => items += 1,
            _ => {}
        }
    }
    items
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(room: u64, rank: Option<Rank>, ranks: u8) -> Meeting {
        Meeting { host: IpAddr::from([10, 0, 0, 1]), port: 8998, room, rank, ranks }
    }

    fn legs(body: &str, api: Api, at: Meeting) -> (String, String) {
        let body = Splice::of(body.as_bytes()).expect("an object");
        let (prefill, decode) = both(body, api, at).expect("short lists");
        [prefill, decode].map(|leg| String::from_utf8(leg.into_vec()).expect("text")).into()
    }

    #[test]
    fn both_legs_are_the_clients_body_with_one_room() {
        let (prefill, decode) = legs(r#"{"messages":[ ] , "stream":true }"#, Api::ChatCompletions, at(42, None, 1));
        let expected = r#"{"messages":[ ] , "stream":true,"bootstrap_host":"10.0.0.1","bootstrap_port":8998,"bootstrap_room":42 }"#;
        assert_eq!((prefill.as_str(), decode.as_str()), (expected, expected));
        let v6 = Meeting { host: "::1".parse().expect("an address"), ..at(1, None, 1) };
        assert!(legs("{}", Api::Completions, v6).0.contains(r#""bootstrap_host":"[::1]""#));
    }

    #[test]
    fn a_room_names_the_rank_and_the_decode_leg_does_too() {
        for random in [0, 1, u64::MAX, 0x1234_5678_9abc_def0] {
            for (rank, ranks) in [(0, 4), (3, 4), (7, 8)] {
                let room = room(random, Some(Rank(rank)), ranks);
                assert_eq!(room % u64::from(ranks), u64::from(rank));
                assert!(room < 1 << 62);
            }
        }
        let (prefill, decode) = legs("{}", Api::Completions, at(6, Some(Rank(2)), 4));
        assert!(!prefill.contains("disagg_prefill_dp_rank") && decode.ends_with(r#","disagg_prefill_dp_rank":2}"#));
    }

    #[test]
    fn a_batch_has_a_room_for_each_prompt() {
        for (body, api, rooms) in [
            (r#"{"prompt":["a, [","b\"]",""]}"#, Api::Completions, "[8,12,16]"),
            (r#"{"prompt":[[1,2],[3]]}"#, Api::Completions, "[8,12]"),
            (r#"{"prompt":[1,2,3]}"#, Api::Completions, "8"),
            (r#"{"text":["a"]}"#, Api::Generate, "[8]"),
            (r#"{"messages":[],"n":2}"#, Api::ChatCompletions, "[8,12]"),
            (r#"{"messages":[],"n":1}"#, Api::ChatCompletions, "8"),
        ] {
            let (prefill, _) = legs(body, api, at(8, None, 4));
            assert!(prefill.ends_with(&format!("\"bootstrap_room\":{rooms}}}")), "{prefill}");
        }
        let long = format!(r#"{{"prompt":["{}"]}}"#, "x".repeat(LIST_BYTES_MAX));
        let body = Splice::of(long.as_bytes()).expect("an object");
        assert_eq!(both(body, Api::Completions, at(1, None, 1)).expect_err("too long"), LegError::LongList);
    }
}
