//! What blocks an endpoint's engine has announced.
//!
//! A dump is read and written on a thread of its own, through a guard per segment (about 5,000 keys), so that neither the
//! ingest thread nor another request waits for it; it is therefore not one point in time.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::pin::Pin;
use std::task::{Context as TaskContext, Poll};

use axum::Json;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use futures_core::Stream;
use serde_json::json;
use shards::ids::{EndpointIndex, ServiceId};
use shards::inventory::ReaderFactory;
use shards::service::Role;
use tokio::sync::{OwnedSemaphorePermit, mpsc};

use crate::supervise::View;

use super::Context;
use super::ask::Asked;

/// Keys written in one piece of an answer.
const KEYS_PER_PIECE: usize = 4096;
/// Pieces written ahead of what the client has taken; beyond them the writer waits.
const PIECES_AHEAD: usize = 4;
/// Most keys of one page. A larger `limit` is refused.
const PAGE_MAX: usize = 1_000_000;
/// Dumps under way at once, each with up to 8 bytes per key. Beyond it they wait for one another.
pub(super) const DUMPS_MAX: usize = 4;

/// What is asked for.
struct Wanted {
    service: ServiceId,
    endpoint: u32,
    summary: bool,
    /// Most keys, where the answer is to be a page.
    limit: Option<usize>,
    /// The last key of the page before.
    after: Option<u64>,
}

/// Where it is found.
struct Found {
    service: ServiceId,
    endpoint: EndpointIndex,
    readers: ReaderFactory,
    algo: &'static str,
}

pub(super) async fn dump(State(context): State<Context>, Asked(query): Asked) -> Response {
    let wanted = match read(&query) {
        Ok(wanted) => wanted,
        Err(text) => return error(StatusCode::BAD_REQUEST, text),
    };
    let Some(found) = find(&context.control.view(), &wanted) else {
        return error(StatusCode::NOT_FOUND, "service or endpoint not found".to_owned());
    };
    // The semaphore is never closed; were it, dumps would only go uncounted.
    let room = std::sync::Arc::clone(&context.dumps).acquire_owned().await.ok();
    let (pieces, body) = mpsc::channel(PIECES_AHEAD);
    tokio::task::spawn_blocking(move || write(&wanted, &found, &pieces, room));
    ([(header::CONTENT_TYPE, "application/json")], Body::from_stream(Pieces(body))).into_response()
}

fn read(query: &HashMap<String, String>) -> Result<Wanted, String> {
    let set = |name: &str| query.get(name).filter(|text| !text.is_empty());
    let service = ServiceId(number(query, "service_id")?);
    let endpoint = number(query, "ep_idx")?;
    let summary = match set("summary").map(String::as_str) {
        None | Some("0" | "false") => false,
        Some("1" | "true") => true,
        Some(other) => return Err(format!("invalid summary: {other:?}: expected 0 or 1")),
    };
    let limit = set("limit").map(|text| match text.parse() {
        Ok(limit) if (1..=PAGE_MAX).contains(&limit) => Ok(limit),
        _ => Err(format!("invalid limit: {text:?}: expected a number within 1 to {PAGE_MAX}")),
    });
    let cursor = |text: &String| text.parse().map_err(|why| format!("invalid cursor: {text:?}: {why}"));
    let after = set("cursor").map(cursor).transpose()?;
    Ok(Wanted { service, endpoint, summary, limit: limit.transpose()?, after })
}

fn find(view: &View, wanted: &Wanted) -> Option<Found> {
    let entry = match view.entry(wanted.service) {
        // The reference's documentation asks for service 0: once that is gone, the oldest KV rule answers for it.
        None if wanted.service == ServiceId(0) => view.entries.iter().find(|entry| entry.inventory.is_some())?,
        entry => entry?,
    };
    let endpoint = EndpointIndex(u16::try_from(wanted.endpoint).ok()?);
    let at = entry.places.get(endpoint.index())?.in_rule?;
    // Decode endpoints have none.
    if entry.rule.endpoints.get(at)?.role == Role::Decode {
        return None;
    }
    let algo = entry.rule.kv.as_ref()?.algo.name();
    Some(Found { service: wanted.service, endpoint, readers: entry.inventory.clone()?, algo })
}

/// Writes the answer; ends early when nobody takes it any more.
fn write(
    wanted: &Wanted,
    found: &Found,
    pieces: &mpsc::Sender<Bytes>,
    _room: Option<OwnedSemaphorePermit>,
) -> Option<()> {
    let send = |text: &mut String| pieces.blocking_send(Bytes::from(std::mem::take(text))).ok();
    let page = Page::of(found, wanted);
    let mut text = format!(
        "{{\"service_id\":{},\"ep_idx\":{},\"hash_algo\":\"{}\"",
        found.service.0, found.endpoint.0, found.algo
    );
    if !wanted.summary {
        text.push_str(",\"blocks\":[");
        for (i, key) in page.keys.iter().enumerate() {
            let comma = if i == 0 { "" } else { "," };
            // Writing to a text cannot fail.
            let _ = write!(text, "{comma}{{\"block_idx\":{},\"hash_uint64\":{key}}}", page.before + i);
            if i % KEYS_PER_PIECE == KEYS_PER_PIECE - 1 {
                send(&mut text)?;
            }
        }
        text.push(']');
    }
    let _ = write!(text, ",\"total\":{}", page.total);
    if let Some(next) = page.next {
        // A text: numbers beyond 2^53 do not survive every client.
        let _ = write!(text, ",\"next_cursor\":\"{next}\"");
    }
    text.push('}');
    send(&mut text)
}

/// A part of an endpoint's keys in ascending order. A key that is held all along is on exactly one page.
struct Page {
    keys: Vec<u64>,
    /// Keys on the pages before.
    before: usize,
    /// Keys in all.
    total: usize,
    /// Where the next page begins; none after the last.
    next: Option<u64>,
}

impl Page {
    fn of(found: &Found, wanted: &Wanted) -> Self {
        let (mut keys, mut before) = (Vec::new(), 0);
        each_key(&found.readers, found.endpoint, &mut |key| match wanted.after {
            Some(after) if key <= after => before += 1,
            _ if wanted.summary => before += 1,
            _ => keys.push(key),
        });
        let total = before + keys.len();
        let mut next = None;
        if let Some(limit) = wanted.limit.filter(|limit| *limit < keys.len()) {
            keys.select_nth_unstable(limit - 1);
            keys.truncate(limit);
            next = keys.iter().max().copied();
        }
        keys.sort_unstable();
        Page { keys, before, total, next }
    }
}

fn each_key(readers: &ReaderFactory, endpoint: EndpointIndex, each: &mut dyn FnMut(u64)) {
    let reader = readers.reader();
    let segments = reader.enter().map_or(0, |guard| guard.segments());
    // What is made of the keys is made outside the guard: a list that has to grow by megabytes would hold up publishing.
    let mut part = Vec::new();
    for segment in 0..segments {
        if let Some(guard) = reader.enter() {
            guard.segment_keys(segment, endpoint, &mut |key| part.push(key.0));
        }
        part.drain(..).for_each(&mut *each);
    }
}

/// Pieces of an answer as its writer hands them over.
struct Pieces(mpsc::Receiver<Bytes>);

impl Stream for Pieces {
    type Item = Result<Bytes, std::convert::Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut TaskContext<'_>) -> Poll<Option<Self::Item>> {
        self.0.poll_recv(context).map(|piece| piece.map(Ok))
    }
}

fn number(query: &HashMap<String, String>, name: &str) -> Result<u32, String> {
    let text = query.get(name).map_or("", String::as_str);
    text.parse().map_err(|why| format!("invalid {name}: {text:?}: {why}"))
}

fn error(status: StatusCode, text: String) -> Response {
    (status, Json(json!({ "error": text }))).into_response()
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
    use std::time::{Duration, Instant};

    use shards::ids::{BlockKey, Rank};
    use shards::inventory;

    use super::*;

    fn found(keys: u64) -> (Found, inventory::Writer) {
        let (mut writer, readers) = inventory::new(&inventory::Options { blocks_expected: keys as usize });
        let endpoint = EndpointIndex(0);
        let holder = writer.add_holder(endpoint, Rank(0)).expect("room");
        for key in 0..keys {
            // Spread, so that the order of the table is not that of the keys.
            writer.store(BlockKey(key.wrapping_mul(0x9e37_79b9_7f4a_7c15)), holder);
        }
        while writer.pending() > 0 {
            assert!(writer.try_publish(), "nobody reads");
        }
        (Found { service: ServiceId(0), endpoint, readers, algo: "sha256_cbor" }, writer)
    }

    fn wanted(limit: Option<usize>, after: Option<u64>) -> Wanted {
        Wanted { service: ServiceId(0), endpoint: 0, summary: false, limit, after }
    }

    /// Publishes in one dump that prove that it lets them through: with a guard held all along there could be two.
    const PUBLISHES: u32 = 10;
    const PATIENCE: Duration = Duration::from_secs(60);

    /// `KVLANE_DUMP_KEYS` keys (1,000,000 by hand).
    #[test]
    fn while_a_dump_is_made_publishing_goes_on_and_no_held_key_is_missed() {
        let keys = std::env::var("KVLANE_DUMP_KEYS").ok().and_then(|text| text.parse().ok()).unwrap_or(100_000);
        let (found, mut writer) = found(keys);
        // The number of the dump under way, 0 between two; and the most publishes that one of them has seen.
        let (dump, most, stop) = (AtomicU32::new(0), AtomicU32::new(0), AtomicBool::new(false));
        let (dump, most, stop) = (&dump, &most, &stop);
        std::thread::scope(|scope| {
            scope.spawn(move || {
                let holder = writer.add_holder(EndpointIndex(1), Rank(0)).expect("room");
                let (mut seen, mut count) = (0, 0);
                for key in 0.. {
                    let before = dump.load(Ordering::SeqCst);
                    writer.store(BlockKey(key % 1024), holder);
                    let published = writer.try_publish();
                    if stop.load(Ordering::SeqCst) {
                        break;
                    }
                    if published && before != 0 && before == dump.load(Ordering::SeqCst) {
                        count = if before == seen { count + 1 } else { 1 };
                        seen = before;
                        most.fetch_max(count, Ordering::SeqCst);
                    }
                }
            });
            let deadline = Instant::now() + PATIENCE;
            for number in 1.. {
                dump.store(number, Ordering::SeqCst);
                let page = Page::of(&found, &wanted(None, None));
                dump.store(0, Ordering::SeqCst);
                assert_eq!(page.keys.len() as u64, keys, "every key that is held all along, and each once");
                if most.load(Ordering::SeqCst) >= PUBLISHES || Instant::now() >= deadline {
                    break;
                }
            }
            stop.store(true, Ordering::SeqCst);
        });
        let most = most.load(Ordering::SeqCst);
        assert!(most >= PUBLISHES, "{most} publishes during a dump of {keys} keys");
    }

    #[test]
    fn pages_show_every_key_once_and_in_order() {
        let (found, _writer) = found(10_000);
        let whole = Page::of(&found, &wanted(None, None));
        assert_eq!((whole.keys.len(), whole.total, whole.before, whole.next), (10_000, 10_000, 0, None));
        let (mut keys, mut after) = (Vec::new(), None);
        loop {
            let page = Page::of(&found, &wanted(Some(3000), after));
            assert_eq!((page.before, page.total), (keys.len(), 10_000));
            keys.extend(page.keys);
            after = page.next;
            if after.is_none() {
                break;
            }
        }
        assert_eq!(keys, whole.keys);
    }
}
