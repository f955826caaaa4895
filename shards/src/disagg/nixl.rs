//! vLLM with NIXL. Pull: the prefill engine's answer says where its blocks lie, and the decode engine comes for them.
//! Push: both legs are sent at once, and the prefill engine brings its blocks to whoever waits under the request's id.

use std::borrow::Cow;
use std::fmt::Write as _;
use std::net::{IpAddr, SocketAddr};

use crate::prompt::{Api, Splice, SpliceError};

/// Bytes of `kv_transfer_params` that are handed on; the decode engine computes the prompt again beyond it.
pub const PARAMS_BYTES_MAX: usize = 4 * 1024 * 1024;

/// What asks a prefill engine to keep its blocks for another.
const ASK: &[u8] = br#"{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}"#;

const MEMBER: &str = "kv_transfer_params";

/// Makes a prefill leg of a body: one token, not streamed.
///
/// # Errors
/// The limits of splicing.
pub fn prefill(body: &mut Splice<'_>, api: Api) -> Result<(), SpliceError> {
    body.set_member(MEMBER, ASK)?;
    body.set_member("stream", b"false")?;
    if api == Api::Responses {
        // Nobody asks the prefill engine for it again.
        body.set_member("store", b"false")?;
        return body.set_member("max_output_tokens", b"1");
    }
    body.set_member("max_tokens", b"1")?;
    if body.value("max_completion_tokens").is_some() {
        body.set_member("max_completion_tokens", b"1")?;
    }
    for name in ["stream_options", "min_tokens", "min_completion_tokens"] {
        body.remove_member(name);
    }
    Ok(())
}

/// The `kv_transfer_params` of a prefill leg's answer, as they are spelled; none where there is nothing to come for.
#[must_use]
pub fn params<'a>(answer: &Splice<'a>) -> Option<&'a [u8]> {
    let params = answer.value(MEMBER)?;
    (params.starts_with(b"{") && params.len() <= PARAMS_BYTES_MAX).then_some(params)
}

/// Makes a decode leg of a body.
///
/// # Errors
/// The limits of splicing.
pub fn decode<'a>(body: &mut Splice<'a>, params: impl Into<Cow<'a, [u8]>>) -> Result<(), SpliceError> {
    body.put_member(MEMBER, params)
}

/// Where a prefill engine that pushes is found.
#[derive(Clone, Copy, Debug)]
pub struct Coordinates<'a> {
    /// Its name (`nixl_engine_id`).
    pub engine_id: &'a str,
    /// Its host.
    pub host: IpAddr,
    /// Its side channel (`nixl_port`).
    pub port: u16,
}

/// The parameters of a decode leg that waits for a push under the request's id.
#[must_use]
pub fn push_params(at: Coordinates<'_>, request_id: &str) -> Vec<u8> {
    let mut params = br#"{"do_remote_decode":false,"do_remote_prefill":true,"remote_engine_id":"#.to_vec();
    params.extend(super::quoted(at.engine_id));
    params.extend(format!(r#","remote_host":"{}","remote_port":{},"#, at.host, at.port).into_bytes());
    params.extend(br#""tp_size":1,"pp_size":1,"remote_request_id":"#);
    params.extend(super::quoted(request_id));
    params.push(b'}');
    params
}

/// The id of both legs where the prefill endpoint names its side channel: connectors read the addresses out of it.
/// `unique` is 32 hexadecimal digits.
#[must_use]
pub fn addressed_id(prefill: SocketAddr, nixl_port: u16, decode: SocketAddr, unique: &str) -> String {
    let mut id = String::with_capacity(128);
    let at = SocketAddr::new(prefill.ip(), nixl_port);
    // A string takes every byte.
    let _whole = write!(id, "___prefill_addr_{at}___decode_addr_{}_{unique}", decode.ip());
    id
}

#[cfg(test)]
mod tests {
    use super::*;

    fn made<'a>(body: &'a str, make: impl FnOnce(&mut Splice<'a>) -> Result<(), SpliceError>) -> String {
        let mut splice = Splice::of(body.as_bytes()).expect("an object");
        make(&mut splice).expect("short edits");
        String::from_utf8(splice.into_vec()).expect("text")
    }

    #[test]
    fn a_prefill_leg_makes_one_token_and_asks_for_its_blocks_to_be_kept() {
        let body = r#"{"prompt": "a\u00e9 b", "stream" : true,"stream_options":{"include_usage":true},"max_tokens":50,"max_completion_tokens":7, "min_tokens":3,"temperature":1.50}"#;
        let ask = std::str::from_utf8(ASK).expect("text");
        let expected = format!(
            r#"{{"prompt": "a\u00e9 b", "stream" : false,"max_tokens":1,"max_completion_tokens":1,"temperature":1.50,"kv_transfer_params":{ask}}}"#
        );
        let of = |api| move |body: &mut Splice<'_>| prefill(body, api);
        assert_eq!(made(body, of(Api::Completions)), expected);
        let bare = made(r#"{"prompt":[1]}"#, of(Api::Completions));
        assert!(bare.contains(r#""max_tokens":1"#) && !bare.contains("max_completion_tokens"), "{bare}");
        let response = made(r#"{"input":"x","max_output_tokens":9,"store":true}"#, of(Api::Responses));
        let expected =
            format!(r#"{{"input":"x","max_output_tokens":1,"store":false,"kv_transfer_params":{ask},"stream":false}}"#);
        assert_eq!(response, expected);
    }

    #[test]
    fn params_are_taken_as_they_are_spelled_or_not_at_all() {
        let found = |answer: &str| {
            let answer = Splice::of(answer.as_bytes()).ok()?;
            params(&answer).map(|params| String::from_utf8(params.to_vec()).expect("text"))
        };
        let spelled = r#"{ "remote_block_ids" : [[1 ,2]],"x":1.50e3, "nested":{"a":[{}],"b":"\u00e9"} }"#;
        let answer =
            format!(r#"{{"choices":[{{"kv_transfer_params":0}}],"kv_transfer_params":{spelled},"usage":{{}}}}"#);
        assert_eq!(found(&answer).as_deref(), Some(spelled));
        let decoded = made(r#"{ "prompt":"x" }"#, |body| decode(body, spelled.as_bytes()));
        assert_eq!(decoded, format!(r#"{{ "prompt":"x","kv_transfer_params":{spelled} }}"#));
        for none in [r#"{"kv_transfer_params":null}"#, "{}", "[]", "{", r#"{"kv_transfer_params":"x"}"#] {
            assert_eq!(found(none), None, "{none}");
        }
        let long = format!(r#"{{"kv_transfer_params":{{"x":"{}"}}}}"#, "y".repeat(PARAMS_BYTES_MAX));
        assert_eq!(found(&long), None);
    }

    #[test]
    fn ids_and_coordinates_are_spelled_as_connectors_read_them() {
        let (prefill, decode) = ("10.0.0.1:8100".parse().expect("an address"), "[::2]:8200".parse().expect("one"));
        let unique = "0123456789abcdef0123456789abcdef";
        assert_eq!(
            addressed_id(prefill, 5600, decode, unique),
            "___prefill_addr_10.0.0.1:5600___decode_addr_::2_0123456789abcdef0123456789abcdef"
        );
        let at = Coordinates { engine_id: "e-1", host: prefill.ip(), port: 5600 };
        let params: serde_json::Value = serde_json::from_slice(&push_params(at, "r\"1")).expect("JSON");
        assert_eq!(params["remote_request_id"], "r1");
        assert_eq!((&params["remote_host"], &params["remote_port"]), (&"10.0.0.1".into(), &5600.into()));
        assert_eq!((&params["do_remote_prefill"], &params["do_remote_decode"]), (&true.into(), &false.into()));
        assert!(params.get("remote_block_ids").is_none());
    }
}
