//! Drains of a tiny server over real sockets.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};

use std::num::NonZeroU32;

use serde_json::{Value, json};
use shards::block::trtllm::V1Block;
use shards::block::{Contract, KeyStream, PromptExtras};
use shards::ids::{EndpointIndex, ServiceId};
use shards::inventory::{self, Walk};
use shards::load::{LoadSlot, LoadTable};
use shards::service::EndpointShared;

use super::super::super::poller::Poller;
use super::super::super::{EndpointSources, Ingest, IngestOptions, ServiceSources};
use super::*;

/// Longest wait for something that must happen.
const PATIENCE: Duration = Duration::from_secs(20);

/// An engine that hands each event to whoever asks first.
#[derive(Clone, Default)]
struct Engine(Arc<Mutex<Inside>>);

#[derive(Default)]
struct Inside {
    events: VecDeque<Value>,
    next_id: u64,
    parent: Option<u64>,
    info: Option<Value>,
    /// What the next answers to a drain are instead.
    instead: VecDeque<Vec<u8>>,
    asked: BTreeMap<String, u64>,
    tokens: BTreeSet<String>,
    under_way: usize,
    under_way_max: usize,
    closed: bool,
}

impl Engine {
    fn start() -> (Self, SocketAddr) {
        let engine = Engine::default();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let serving = engine.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (engine, stream) = (serving.clone(), stream.unwrap());
                if engine.inside().closed {
                    return;
                }
                std::thread::spawn(move || engine.serve(stream));
            }
        });
        (engine, address)
    }

    fn inside(&self) -> std::sync::MutexGuard<'_, Inside> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn serve(&self, stream: TcpStream) {
        let mut lines = BufReader::new(stream.try_clone().unwrap());
        let mut stream = stream;
        loop {
            let mut request = String::new();
            if lines.read_line(&mut request).unwrap_or(0) == 0 {
                return;
            }
            loop {
                let mut line = String::new();
                if lines.read_line(&mut line).unwrap_or(0) == 0 || line == "\r\n" {
                    break;
                }
                if let Some(token) = line.strip_prefix("Authorization: ") {
                    self.inside().tokens.insert(token.trim().to_owned());
                }
            }
            let what = request.rsplit_once(' ').unwrap().0.to_owned();
            let answer = self.answer(&what);
            self.inside().under_way -= 1;
            if stream.write_all(&answer).is_err() || self.inside().closed {
                return;
            }
        }
    }

    fn answer(&self, what: &str) -> Vec<u8> {
        let mut inside = self.inside();
        *inside.asked.entry(what.to_owned()).or_default() += 1;
        inside.under_way += 1;
        inside.under_way_max = inside.under_way_max.max(inside.under_way);
        match what {
            "GET /server_info" => match &inside.info {
                Some(info) => ok(&info.to_string()),
                None => b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n".to_vec(),
            },
            "POST /kv_cache_events" => match inside.instead.pop_front() {
                Some(answer) => answer,
                None => {
                    let events: Vec<Value> = inside.events.drain(..).collect();
                    chunked(&Value::from(events).to_string())
                }
            },
            _ => b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n".to_vec(),
        }
    }

    /// One more block at the end of the one chain.
    fn store(&self) {
        let mut inside = self.inside();
        let tokens = [inside.next_id as u32, 1, 2, 3];
        let key = V1Block { parent: inside.parent.unwrap_or(0), tokens: &tokens, ..V1Block::default() }.key();
        let tokens: Vec<Value> = tokens.iter().map(|id| json!({"token_id": id, "token_extra_id": 0})).collect();
        let block = json!({"block_hash": key, "tokens": tokens, "cache_level": 0});
        let data = json!({"type": "stored", "parent_hash": inside.parent, "blocks": [block]});
        let event = json!({"event_id": inside.next_id, "window_size": 8192, "data": data});
        inside.events.push_back(event);
        inside.next_id += 1;
        inside.parent = Some(key);
    }

    fn asked(&self, what: &str) -> u64 {
        self.inside().asked.get(what).copied().unwrap_or(0)
    }
}

fn ok(body: &str) -> Vec<u8> {
    format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len()).into_bytes()
}

fn chunked(body: &str) -> Vec<u8> {
    let (first, second) = body.split_at(body.len() / 2);
    let chunk = |text: &str| if text.is_empty() { String::new() } else { format!("{:x}\r\n{text}\r\n", text.len()) };
    format!("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n{}{}0\r\n\r\n", chunk(first), chunk(second))
        .into_bytes()
}

/// A drain with what its operations add up to.
struct Reader {
    drain: Drain,
    held: BTreeSet<u64>,
    eligible: bool,
    _poller: Poller,
}

impl Reader {
    fn start(address: SocketAddr) -> Self {
        Reader::with(&DrainFrom { poll_min: Duration::from_millis(1), ..DrainFrom::new(address) })
    }

    fn with(from: &DrainFrom) -> Self {
        let poller = Poller::new().unwrap();
        let blocks = DrainBlocks { block_tokens: 4, weights: MediumWeights::default(), blocks_max: 1_000 };
        let drain = Drain::start(from, "engine", blocks, poller.waker()).unwrap();
        Reader { drain, held: BTreeSet::new(), eligible: false, _poller: poller }
    }

    fn read(&mut self) {
        for batch in self.drain.batches.try_iter() {
            for op in batch.ops {
                match op {
                    Op::Store(0, key) => assert!(self.held.insert(key.0)),
                    Op::Remove(0, key) => assert!(self.held.remove(&key.0)),
                    Op::Clear(0) => self.held.clear(),
                    other => panic!("{other:?}"),
                }
            }
            self.eligible = batch.eligible;
            assert_eq!(batch.distinct, self.held.len() as u64);
        }
    }

    fn report(&self) -> Report {
        self.drain.report.lock().unwrap().clone()
    }

    fn until(&mut self, what: &str, mut is_so: impl FnMut(&mut Self) -> bool) {
        let until = Instant::now() + PATIENCE;
        while !{
            self.read();
            is_so(self)
        } {
            assert!(Instant::now() < until, "{what}: {:?}", self.report());
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn until_phase(&mut self, phase: Phase) {
        self.until(phase.name(), |reader| reader.report().phase == phase);
    }
}

#[test]
fn what_the_engine_announces_is_held_and_nothing_else_of_it_is_asked() {
    let (engine, address) = Engine::start();
    engine.inside().info = Some(json!({"tokens_per_block": 4, "kv_cache_hash_algo": "v1_block_key"}));
    (0..3).for_each(|_| engine.store());
    let file = TokenFile::new("drain", "s3cr3t");
    let token = Arc::new(EngineToken::read(crate::rules::RuleFile::anywhere(&file.0)).unwrap());
    let from = DrainFrom { token: Some(Arc::clone(&token)), ..DrainFrom::new(address) };
    assert!(!format!("{from:?}").contains("s3cr3t"));
    let mut reader = Reader::with(&from);
    reader.until("3 blocks", |reader| reader.held.len() == 3 && reader.eligible);
    engine.store();
    reader.until("4 blocks", |reader| reader.held.len() == 4);
    let polls = engine.asked("POST /kv_cache_events");
    reader.until("it goes on asking", |_| engine.asked("POST /kv_cache_events") > polls + 3);
    let inside = engine.inside();
    let asked: Vec<&str> = inside.asked.keys().map(String::as_str).collect();
    assert_eq!(asked, ["GET /server_info", "POST /kv_cache_events"]);
    assert_eq!(inside.tokens, BTreeSet::from(["Bearer s3cr3t".to_owned()]));
    assert_eq!(inside.under_way_max, 1, "one request at a time");
    drop(inside);
    file.write("an0ther");
    assert!(token.refresh().unwrap());
    reader.until("the new token is shown", |_| engine.inside().tokens.contains("Bearer an0ther"));
}

/// A token's file, which goes with the test.
struct TokenFile(std::path::PathBuf);

impl TokenFile {
    fn new(name: &str, token: &str) -> Self {
        let file = TokenFile(std::env::temp_dir().join(format!("kvlane-{name}-token-{}", std::process::id())));
        file.write(token);
        file
    }

    fn write(&self, token: &str) {
        std::fs::write(&self.0, token).unwrap();
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o600);
        std::fs::set_permissions(&self.0, mode).unwrap();
    }
}

impl Drop for TokenFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

#[test]
fn answers_of_other_kinds_cost_nothing_and_a_lost_one_is_no_second_drainer() {
    let (engine, address) = Engine::start();
    engine.store();
    engine.inside().instead.push_back(b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\n\r\n".to_vec());
    let mut reader = Reader::start(address);
    reader.until("the block", |reader| reader.held.len() == 1);
    assert_eq!(reader.report().errors, 1);
    // An answer that ends early takes the next event with it.
    engine.inside().next_id += 1;
    engine.inside().instead.push_back(b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\n[".to_vec());
    engine.inside().closed = true;
    reader.until("the loss", |reader| reader.report().answers_lost > 0 && !reader.eligible);
    assert_eq!(reader.report().phase, Phase::Unreachable);
}

#[test]
fn an_engine_of_another_block_size_is_refused_with_both_numbers() {
    let (engine, address) = Engine::start();
    engine.inside().info = Some(json!({"tokens_per_block": 32}));
    let mut reader = Reader::start(address);
    reader.until_phase(Phase::Refused);
    let detail = reader.report().detail;
    assert!(detail.contains("32") && detail.contains('4'), "{detail}");
    assert_eq!(engine.asked("POST /kv_cache_events"), 0);
}

#[test]
fn an_engine_that_is_not_there_is_said_to_be_so() {
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let mut reader = Reader::start(address);
    reader.until_phase(Phase::Unreachable);
    assert!(reader.report().detail.contains("connect"), "{}", reader.report().detail);
}

#[test]
fn an_answer_beyond_the_limit_is_not_read_to_its_end() {
    let (engine, address) = Engine::start();
    engine.inside().instead.push_back(b"HTTP/1.1 200 OK\r\nContent-Length: 999999999\r\n\r\n[".to_vec());
    let mut reader = Reader::start(address);
    reader.until("the loss", |reader| reader.report().detail.contains("67108864"));
    assert_eq!(reader.report().answers_lost, 1);
    reader.until_phase(Phase::Draining);
}

#[test]
fn two_drainers_of_one_engine_are_named_within_five_seconds_and_one_of_them_goes() {
    let (engine, address) = Engine::start();
    let mut readers = [Reader::start(address), Reader::start(address)];
    let started = Instant::now();
    let mut named = None;
    while !readers.iter().any(|reader| reader.report().phase == Phase::SecondDrainer) {
        assert!(started.elapsed() < PATIENCE, "{:?}", readers.each_ref().map(Reader::report));
        engine.store();
        readers.iter_mut().for_each(Reader::read);
        let is_named = |reader: &Reader| reader.report().detail.starts_with("second_drainer");
        if named.is_none() && readers.iter().any(is_named) {
            named = Some(started.elapsed());
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    assert!(named.is_some_and(|after| after < Duration::from_secs(5)), "{named:?}");
    let place = readers.iter().position(|reader| reader.report().phase == Phase::SecondDrainer).unwrap();
    let gone = &mut readers[place];
    gone.until("its blocks do not count", |gone| !gone.eligible);
    assert!(gone.report().ownership_faults > 0);
    let answers = gone.report().answers;
    (0..50).for_each(|_| engine.store());
    assert_eq!(gone.report().answers, answers, "who goes asks no more");
}

#[test]
fn a_drain_that_is_dropped_ends_its_thread() {
    let (engine, address) = Engine::start();
    let mut reader = Reader::start(address);
    reader.until_phase(Phase::Draining);
    let batches = reader.drain.batches.clone();
    drop(reader);
    let until = Instant::now() + PATIENCE;
    while batches.recv_timeout(Duration::from_millis(10)) != Err(crossbeam::channel::RecvTimeoutError::Disconnected) {
        assert!(Instant::now() < until);
        engine.store();
    }
}

#[test]
fn drained_blocks_are_routable_while_the_engine_is_there_and_go_with_its_endpoint() {
    let (engine, address) = Engine::start();
    (0..3).for_each(|_| engine.store());
    let loads = Arc::new(LoadTable::new(1, 1));
    let ingest = Ingest::start(IngestOptions::new(loads)).unwrap();
    let (writer, readers) = inventory::new(&inventory::Options { blocks_expected: 1_000 });
    let shared = Arc::new(EndpointShared::new(EndpointIndex(0), LoadSlot(0), 1));
    let (label, drain) = ("engine".to_owned(), Some(DrainFrom::new(address)));
    let endpoint =
        EndpointSources { index: EndpointIndex(0), shared: Arc::clone(&shared), label, ranks: Vec::new(), drain };
    let mut sources = ServiceSources {
        id: ServiceId(0),
        pool: crate::ingest::Pool::Prompts,
        engine: shards::service::Engine::Trtllm,
        block_tokens: 4,
        weights: MediumWeights::default(),
        believed: None,
        endpoints: vec![endpoint],
    };
    ingest.add_service(sources.clone(), writer).unwrap();
    let size = NonZeroU32::new(4).unwrap();
    let mut stream = KeyStream::new(&Contract::TrtllmTokens, &PromptExtras::default(), size).unwrap();
    let tokens: Vec<u32> = (0..4).flat_map(|id| [id, 1, 2, 3]).collect();
    let mut rest = &tokens[..];
    let keys: Vec<_> = std::iter::from_fn(|| stream.next_key(&mut rest)).collect();
    let reader = readers.reader();
    let matched = || {
        let guard = reader.enter()?;
        let mut walk = Walk::default();
        guard.advance(&mut walk, &keys);
        walk.runs(&guard).map(|run| run.blocks).max()
    };
    let until = |what: &str, blocks: Option<u32>| {
        let until = Instant::now() + PATIENCE;
        while matched() != blocks || shared.kv_blocks() != u64::from(blocks.unwrap_or(0)) {
            assert!(Instant::now() < until, "{what}: {:?}, {:?}", matched(), ingest.drains());
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    until("what it had", Some(3));
    engine.store();
    until("what came", Some(4));
    let status = ingest.drains();
    assert_eq!((status.len(), status[0].phase, status[0].blocks_stored), (1, Phase::Draining, 4));
    sources.endpoints.clear();
    ingest.update_service(sources).unwrap();
    until("nothing is left", None);
    assert!(ingest.drains().is_empty());
}
