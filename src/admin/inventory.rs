//! What blocks an endpoint's engine has announced.
//!
//! A dump is read and written on a thread of its own, through a guard per segment (about 5,000 keys), so that neither the
//! ingest thread nor another request waits for it; it is therefore not one point in time.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context as TaskContext, Poll, ready};
use std::time::Duration;

use axum::Json;
use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::http::{Extensions, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use futures_core::Stream;
use serde_json::json;
use shards::ids::{EndpointIndex, ServiceId};
use shards::inventory::ReaderFactory;
use shards::service::Role;
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tokio::time::{Instant, timeout, timeout_at};

use crate::supervise::View;

use super::ask::Asked;
use super::places::Turn;
use super::{Context, guard};

/// Keys written in one piece of an answer.
const KEYS_PER_PIECE: usize = 4096;
/// Pieces written ahead of what the client has taken; beyond them the writer waits.
const PIECES_AHEAD: usize = 4;
/// Most keys of one page. A larger `limit` is refused.
const PAGE_MAX: usize = 1_000_000;
/// Dumps under way at once, each with up to 8 bytes per key. Beyond it they wait for one another.
pub(super) const DUMPS_MAX: usize = 4;
/// Longest wait for one another. Then: 503.
const ROOM_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a client may take for the first pieces, and for each further one; a connection that takes nothing at all is
/// ended anyway. One that takes longer loses its place, and its answer ends before its end.
const PACE: Pace = Pace { first: Duration::from_secs(10), each: Duration::from_millis(500) };

/// How fast an answer is to be taken.
#[derive(Clone, Copy)]
struct Pace {
    first: Duration,
    each: Duration,
}

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

pub(super) async fn dump(State(context): State<Context>, Asked(query): Asked, request: Request) -> Response {
    let wanted = match read(&query) {
        Ok(wanted) => wanted,
        Err(text) => return error(StatusCode::BAD_REQUEST, text),
    };
    let Some(found) = find(&context.control.view(), &wanted) else {
        return error(StatusCode::NOT_FOUND, "service or endpoint not found".to_owned());
    };
    let Some(room) = room(&context, request.extensions()).await else {
        let text = "other inventories are being read: ask again, or for pages (limit=)";
        let mut busy = error(StatusCode::SERVICE_UNAVAILABLE, text.to_owned());
        busy.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("5"));
        return busy;
    };
    let (mut taker, body) = taken_at(PACE);
    tokio::task::spawn_blocking(move || {
        let _room = room;
        write(&wanted, &found, &mut taker).map(|()| taker.end())
    });
    ([(header::CONTENT_TYPE, "application/json")], Body::from_stream(body)).into_response()
}

/// Room for a dump; none where it is long in coming. A connection that waits for it makes room for others.
async fn room(context: &Context, extensions: &Extensions) -> Option<OwnedSemaphorePermit> {
    if let Ok(room) = Arc::clone(&context.dumps).try_acquire_owned() {
        return Some(room);
    }
    let place = guard::place_of(extensions);
    let turn = |turn| place.iter().for_each(|place| place.now(turn));
    turn(Turn::Queue);
    let room = timeout(ROOM_TIMEOUT, Arc::clone(&context.dumps).acquire_owned()).await;
    turn(Turn::Work);
    room.ok()?.ok()
}

pub(super) async fn no_such_method() -> Response {
    (StatusCode::METHOD_NOT_ALLOWED, [(header::ALLOW, "GET, HEAD")], "method not allowed\n").into_response()
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
fn write(wanted: &Wanted, found: &Found, taker: &mut Taker) -> Option<()> {
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
                taker.hand(&mut text)?;
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
    taker.hand(&mut text)
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

/// The two ends of an answer that is to be taken at a pace. Called within a runtime.
fn taken_at(pace: Pace) -> (Taker, Pieces) {
    let (pieces, body) = mpsc::channel(PIECES_AHEAD);
    let whole = Arc::new(AtomicBool::new(false));
    let taker = Taker { pieces, whole: Arc::clone(&whole), runtime: Handle::current(), pace, until: None };
    (taker, Pieces { pieces: body, whole })
}

/// Where the writer of an answer hands over its pieces.
struct Taker {
    pieces: mpsc::Sender<Bytes>,
    whole: Arc<AtomicBool>,
    runtime: Handle,
    pace: Pace,
    /// When the next piece is to be taken at the latest.
    until: Option<Instant>,
}

impl Taker {
    /// Hands over a piece; none where the client left or is too slow. Blocks.
    fn hand(&mut self, text: &mut String) -> Option<()> {
        let until = self.until.map_or_else(|| Instant::now() + self.pace.first, |until| until + self.pace.each);
        self.until = Some(until);
        let piece = self.pieces.send(Bytes::from(std::mem::take(text)));
        self.runtime.block_on(async { timeout_at(until, piece).await }).ok()?.ok()
    }

    /// Ends the answer as a whole one.
    fn end(self) {
        self.whole.store(true, Ordering::Release);
    }
}

/// Pieces of an answer as its writer hands them over. One that ends early is an error: the connection ends with it.
struct Pieces {
    pieces: mpsc::Receiver<Bytes>,
    whole: Arc<AtomicBool>,
}

impl Stream for Pieces {
    type Item = io::Result<Bytes>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut TaskContext<'_>) -> Poll<Option<Self::Item>> {
        Poll::Ready(match ready!(self.pieces.poll_recv(context)) {
            Some(piece) => Some(Ok(piece)),
            None if self.whole.swap(true, Ordering::Acquire) => None,
            None => Some(Err(io::ErrorKind::TimedOut.into())),
        })
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
    use std::sync::atomic::AtomicU32;
    use std::time::Instant;

    use axum::body::to_bytes;
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

    /// What a client gets of a dump that it takes so slowly.
    fn dumped(pace: Pace, keys: u64, waits: Duration) -> Result<Bytes, axum::Error> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(async {
            let (mut taker, body) = taken_at(pace);
            let (found, writer) = found(keys);
            let written = tokio::task::spawn_blocking(move || {
                let _writer = writer;
                write(&wanted(None, None), &found, &mut taker).map(|()| taker.end())
            });
            tokio::time::sleep(waits).await;
            let taken = to_bytes(Body::from_stream(body), usize::MAX).await;
            written.await.expect("it ends, and gives its room back");
            taken
        })
    }

    #[test]
    fn a_dump_that_is_taken_too_slowly_ends_and_is_no_whole_answer() {
        let keys = (KEYS_PER_PIECE * (PIECES_AHEAD + 3)) as u64;
        let short = Pace { first: Duration::from_millis(20), each: Duration::ZERO };
        assert!(dumped(short, keys, Duration::from_millis(200)).is_err());
        let patient = Pace { first: PATIENCE, each: Duration::ZERO };
        let whole = dumped(patient, keys, Duration::ZERO).expect("a whole answer");
        let whole: serde_json::Value = serde_json::from_slice(&whole).expect("JSON");
        assert_eq!(whole["total"], keys);
    }
}
