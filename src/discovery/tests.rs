use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::TcpListener;

use super::*;

/// An engine that answers paths with fixed bodies, 404 elsewhere, and 401 without its token.
fn engine(token: Option<&'static str>, answers: &[(&'static str, &'static str)]) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = listener.local_addr().expect("bound");
    let answers: HashMap<_, _> = answers.iter().copied().collect();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { return };
            let mut request = vec![0; 4096];
            let Ok(read) = stream.read(&mut request) else { continue };
            let request = String::from_utf8_lossy(&request[..read]).into_owned();
            let path = request.split(' ').nth(1).unwrap_or_default();
            let allowed = token.is_none_or(|token| request.contains(&format!("\r\nAuthorization: Bearer {token}\r\n")));
            let (status, body) = match answers.get(path) {
                _ if !allowed => ("401 Unauthorized", "{}"),
                Some(body) => ("200 OK", *body),
                None => ("404 Not Found", "{}"),
            };
            let length = body.len();
            let _ = write!(stream, "HTTP/1.1 {status}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}");
        }
    });
    address
}

fn asked(engine: Engine, address: SocketAddr, authorization: Option<&str>, known: Found) -> Found {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(ask(engine, address, authorization, known))
}

const MODELS: (&str, &str) =
    ("/v1/models", r#"{"data":[{"id":"m","parent":null},{"id":"a","root":"/a","parent":"m"}]}"#);

#[test]
fn each_engine_is_asked_what_it_knows() {
    let vllm = engine(None, &[("/version", r#"{"version":"0.31.1"}"#), MODELS]);
    let found = asked(Engine::Vllm, vllm, None, Found::default());
    assert_eq!((found.access.clone(), found.facts.version.as_deref()), (Access::Open, Some("0.31.1")));
    assert!(found.facts.models.contains("m") && found.facts.adapters.contains_key("a"));

    let sglang = engine(None, &[("/server_info", r#"{"version":"0.5.22","speculative_algorithm":"EAGLE"}"#), MODELS]);
    let found = asked(Engine::Sglang, sglang, None, Found::default());
    assert_eq!((found.access.clone(), found.facts.bigrams), (Access::Open, true));
    assert!(found.server_info_at.is_some());
}

#[test]
fn an_engine_that_wants_a_token_is_not_a_dead_one() {
    let address = engine(Some("s3cr3t"), &[("/version", r#"{"version":"0.32.0"}"#), MODELS]);
    let open = asked(Engine::Vllm, address, Some("Bearer s3cr3t"), Found::default());
    assert_eq!(open.access, Access::Open);
    for wrong in [None, Some("Bearer guess")] {
        let found = asked(Engine::Vllm, address, wrong, open.clone());
        assert_eq!(found.access, Access::Denied(401));
        assert_eq!(found.facts, open.facts, "what was known stays known");
    }
}

#[test]
fn every_call_shows_the_token_and_is_told_apart_from_a_dead_engine_where_it_is_refused() {
    let info = r#"{"version":"0.5.23"}"#;
    let answers = [("/version", r#"{"version":"1.2.0"}"#), ("/server_info", info), MODELS];
    for kind in Engine::ALL {
        let address = engine(Some("s3cr3t"), &answers);
        let open = asked(kind, address, Some("Bearer s3cr3t"), Found::default());
        assert_eq!(open.access, Access::Open, "{kind:?}: the token is shown in each of its calls");
        assert_eq!(asked(kind, address, None, open).access, Access::Denied(401), "{kind:?}");
        let guarded: Vec<_> = answers.iter().copied().filter(|(path, _)| *path != "/v1/models").collect();
        let listener = engine(None, &guarded);
        let found = asked(kind, listener, None, Found::default());
        assert!(matches!(found.access, Access::Failed(_)), "{kind:?}: 404 is no denial");
    }
}

#[test]
fn a_silent_engine_changes_nothing_that_was_known() {
    let address = engine(None, &[("/version", r#"{"version":"0.32.0"}"#), MODELS]);
    let known = asked(Engine::Vllm, address, None, Found::default());
    let nobody = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr()).expect("a free port");
    let found = asked(Engine::Vllm, nobody, None, known.clone());
    assert!(matches!(&found.access, Access::Failed(why) if why.starts_with("GET /version: ")), "{:?}", found.access);
    assert_eq!(found.facts, known.facts);
    let hidden = asked(Engine::Vllm, engine(None, &[MODELS]), None, Found::default());
    assert!(matches!(&hidden.access, Access::Failed(why) if why.contains("404")), "{:?}", hidden.access);
    assert!(hidden.facts.models.contains("m"), "what it does answer is taken");
}

#[test]
fn probes_and_questions_are_kept_side_by_side() {
    let discovery = Discovery::default();
    let key = (ServiceId(1), EndpointIndex(2));
    assert!(discovery.put_health(key, Access::Denied(403)));
    assert!(!discovery.put_health(key, Access::Denied(403)));
    discovery.put(key, Found { access: Access::Open, ..Found::default() });
    let found = discovery.clone().found(key);
    assert_eq!((found.access, found.health), (Access::Open, Access::Denied(403)));
    discovery.retain(|_| false);
    assert_eq!(discovery.found(key).health, Access::Untried);
}
