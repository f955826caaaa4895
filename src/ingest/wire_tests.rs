//! Ingest as a whole, over real ZMQ sockets on loopback: publishers and replay servers as vLLM runs them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::Instant;

use serde_json::Value;
use shards::ids::{BlockKey, ShardId};
use shards::inventory::{self, Reader, Walk};
use shards::load::LoadSlot;
use zmq::{DONTWAIT, SocketType};

use super::*;

const PATIENCE: Duration = Duration::from_secs(20);

/// Waits until `what` holds; the deadline only ends a test that has failed already.
fn until(name: &str, mut what: impl FnMut() -> bool) {
    let start = Instant::now();
    while !what() {
        assert!(start.elapsed() < PATIENCE, "not within {PATIENCE:?}: {name}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// What an engine sends: `[ts, events, 0]` with one event, array-encoded as up to vLLM 0.23.
fn payload(clock: u64, events: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = vec![0x93, 0xcb];
    bytes.extend_from_slice(&(clock as f64).to_be_bytes());
    bytes.push(0x90 | events.len() as u8);
    events.iter().for_each(|event| bytes.extend_from_slice(event));
    bytes.push(0);
    bytes
}

fn keys(bytes: &mut Vec<u8>, keys: &[u64]) {
    bytes.extend_from_slice(&[0xdc, (keys.len() >> 8) as u8, keys.len() as u8]);
    for key in keys {
        bytes.push(0xcf);
        bytes.extend_from_slice(&key.to_be_bytes());
    }
}

fn stored_of(stored: &[u64], block: u8) -> Vec<u8> {
    let mut bytes = b"\x97\xabBlockStored".to_vec();
    keys(&mut bytes, stored);
    bytes.push(0xc0);
    keys(&mut bytes, &vec![1; stored.len() * usize::from(block)]);
    bytes.extend_from_slice(&[block, 0xc0, 0xa3, b'G', b'P', b'U']);
    bytes
}

fn stored(keys: &[u64]) -> Vec<u8> {
    stored_of(keys, 4)
}

fn removed(removed: &[u64]) -> Vec<u8> {
    let mut bytes = b"\x93\xacBlockRemoved".to_vec();
    keys(&mut bytes, removed);
    bytes.extend_from_slice(b"\xa3GPU");
    bytes
}

fn cleared() -> Vec<u8> {
    b"\x91\xb0AllBlocksCleared".to_vec()
}

/// The batches an engine can send again.
type Ring = Vec<(u64, Vec<u8>)>;

/// An engine's event sockets.
struct Engine {
    publisher: zmq::Socket,
    address: String,
    replay: Option<zmq::Socket>,
    replay_address: Option<String>,
    /// Replies carry the topic frame (vLLM 0.26 and later).
    topic_in_replies: bool,
    seq: u64,
    clock: u64,
    ring: Ring,
    context: zmq::Context,
}

fn bind(context: &zmq::Context, kind: SocketType, address: &str) -> (zmq::Socket, String) {
    let socket = context.socket(kind).unwrap();
    socket.set_linger(0).unwrap();
    socket.set_sndhwm(100_000).unwrap();
    socket.set_ipv6(address.contains('[')).unwrap();
    // A port that was just left takes a moment to come free.
    until("the port is free", || socket.bind(address).is_ok());
    let address = socket.get_last_endpoint().unwrap().unwrap();
    (socket, address)
}

impl Engine {
    fn start_at(address: &str, replay: Option<&str>) -> Self {
        let context = zmq::Context::new();
        let (publisher, address) = bind(&context, SocketType::PUB, address);
        let (replay, replay_address) = replay.map(|address| bind(&context, SocketType::ROUTER, address)).unzip();
        let topic_in_replies = true;
        Engine { publisher, address, replay, replay_address, topic_in_replies, seq: 0, clock: 1, ring: vec![], context }
    }

    fn start(with_replay: bool) -> Self {
        Self::start_at("tcp://127.0.0.1:*", with_replay.then_some("tcp://127.0.0.1:*"))
    }

    fn source(&self, rank: u8) -> RankSource {
        RankSource { rank: Rank(rank), mode: Mode::Connect(self.address.clone()), replay: self.replay_address.clone() }
    }

    fn send_raw(&self, frames: &[&[u8]]) {
        self.publisher.send_multipart(frames.iter().copied(), 0).unwrap();
    }

    /// A batch that is in the ring, and reaches nobody.
    fn lose(&mut self, events: &[Vec<u8>]) {
        self.ring.push((self.seq, payload(self.clock, events)));
        self.seq += 1;
        self.clock += 1;
    }

    fn send(&mut self, events: &[Vec<u8>]) {
        self.lose(events);
        let (seq, payload) = self.ring.last().unwrap();
        self.send_raw(&[b"", &seq.to_be_bytes(), payload]);
    }

    /// Answers what replay requests there are.
    fn serve(&mut self) {
        let Some(router) = &self.replay else { return };
        while let Ok(request) = router.recv_multipart(DONTWAIT) {
            let [peer, delimiter, start] = &request[..] else { panic!("{request:?}") };
            assert!(delimiter.is_empty());
            let start = u64::from_be_bytes(start[..].try_into().unwrap());
            let end = (u64::MAX, Vec::new());
            for (seq, payload) in self.ring.iter().filter(|(seq, _)| *seq >= start).chain([&end]) {
                let mut frames =
                    vec![peer.clone(), Vec::new(), Vec::new(), seq.to_be_bytes().to_vec(), payload.clone()];
                if !self.topic_in_replies {
                    frames.remove(2);
                }
                router.send_multipart(frames, 0).unwrap();
            }
        }
    }

    /// Dies and gives up its ports; what comes back is given the same addresses.
    fn kill(self) -> (String, Option<String>, Ring) {
        let Engine { publisher, replay, mut context, address, replay_address, ring, .. } = self;
        drop((publisher, replay));
        context.destroy().unwrap();
        (address, replay_address, ring)
    }
}

/// Ingest with one service.
struct Gateway {
    ingest: Ingest,
    reader: Reader,
    endpoints: Vec<EndpointSources>,
    loads: Arc<LoadTable>,
}

fn endpoint(index: u16, ranks: Vec<RankSource>) -> EndpointSources {
    let shared = Arc::new(EndpointShared::new(EndpointIndex(index), LoadSlot(u32::from(index)), 2));
    EndpointSources { index: EndpointIndex(index), shared, label: format!("engine-{index}"), ranks, drain: None }
}

impl Gateway {
    fn start(block_tokens: u32, endpoints: Vec<Vec<RankSource>>) -> Self {
        Self::start_with(block_tokens, endpoints, |_| ())
    }

    fn start_with(block_tokens: u32, endpoints: Vec<Vec<RankSource>>, change: impl FnOnce(&mut IngestOptions)) -> Self {
        let loads = Arc::new(LoadTable::new(2, 8));
        let mut options = IngestOptions::new(Arc::clone(&loads));
        options.replay_timeout = Duration::from_millis(300);
        change(&mut options);
        let ingest = Ingest::start(options).unwrap();
        let (writer, readers) = inventory::new(&inventory::Options { blocks_expected: 1_000 });
        let endpoints: Vec<_> = endpoints.into_iter().enumerate().map(|(i, ranks)| endpoint(i as u16, ranks)).collect();
        let sources = ServiceSources {
            id: ServiceId(0),
            pool: Pool::Prompts,
            engine: shards::service::Engine::Vllm,
            block_tokens,
            weights: MediumWeights::default(),
            believed: None,
            endpoints: endpoints.clone(),
        };
        ingest.add_service(sources, writer).unwrap();
        let streams = endpoints.iter().map(|endpoint| endpoint.ranks.len()).sum::<usize>();
        until("all streams are open", || ingest.status().len() == streams);
        Gateway { ingest, reader: readers.reader(), endpoints, loads }
    }

    fn held(&self, endpoint: u16) -> BTreeSet<u64> {
        let mut held = BTreeSet::new();
        let Some(segments) = self.reader.enter().map(|guard| guard.segments()) else { return held };
        for segment in 0..segments {
            let Some(guard) = self.reader.enter() else { return held };
            guard.segment_keys(segment, EndpointIndex(endpoint), &mut |key| assert!(held.insert(key.0)));
        }
        held
    }

    fn holds(&self, endpoint: u16, expected: &[u64]) -> bool {
        let shared = &self.endpoints[usize::from(endpoint)].shared;
        self.held(endpoint) == expected.iter().copied().collect() && shared.kv_blocks() == expected.len() as u64
    }

    /// (endpoint, rank) of those whose block may be routed by.
    fn routable(&self, key: u64) -> Vec<(u16, u8)> {
        let Some(guard) = self.reader.enter() else { return Vec::new() };
        let mut walk = Walk::default();
        guard.advance(&mut walk, &[BlockKey(key)]);
        let mut holders: Vec<_> = walk.runs(&guard).map(|run| (run.endpoint.0, run.rank.0)).collect();
        holders.sort_unstable();
        holders
    }

    fn status(&self, endpoint: u16, rank: u8) -> StreamStatus {
        let all = self.ingest.status();
        all.into_iter().find(|stream| stream.name.endpoint.0 == endpoint && stream.name.rank.0 == rank).unwrap()
    }

    /// Sends empty batches until one arrives live: a publisher learns of its subscriber some time after the
    /// connection.
    fn meet(&self, engine: &mut Engine, endpoint: u16, rank: u8) {
        until("the first replay is over", || {
            engine.serve();
            engine.replay.is_none() || self.status(endpoint, rank).replays > 0
        });
        let batches = self.status(endpoint, rank).batches;
        until("a live batch arrives", || {
            engine.serve();
            engine.send(&[]);
            self.status(endpoint, rank).batches > batches
        });
    }
}

#[test]
fn blocks_come_go_and_are_cleared() {
    let mut engine = Engine::start(false);
    let gateway = Gateway::start(4, vec![vec![engine.source(0)]]);
    gateway.meet(&mut engine, 0, 0);
    engine.send(&[stored(&[1, 2, 3])]);
    until("stored", || gateway.holds(0, &[1, 2, 3]));
    assert_eq!(gateway.routable(1), [(0, 0)]);
    engine.send(&[removed(&[2]), stored(&[4])]);
    until("removed and stored", || gateway.holds(0, &[1, 3, 4]));
    engine.send(&[cleared(), stored(&[9])]);
    until("cleared", || gateway.holds(0, &[9]));
    assert!(gateway.routable(1).is_empty());
    let status = gateway.status(0, 0);
    assert!(status.connected && status.eligible);
    assert_eq!((status.last_seq, status.clears, status.held), (Some(engine.seq - 1), 1, 1));
    assert_eq!((status.gaps, status.restarts, status.blocks_stored, status.blocks_removed), (0, 0, 5, 1));
}

#[test]
fn a_dead_engine_is_masked_within_a_second_then_empty_and_refilled() {
    let mut engine = Engine::start(false);
    let mut other = Engine::start(false);
    let gateway = Gateway::start(4, vec![vec![engine.source(0)], vec![other.source(0)]]);
    gateway.meet(&mut engine, 0, 0);
    gateway.meet(&mut other, 1, 0);
    engine.send(&[stored(&[1, 2])]);
    other.send(&[stored(&[1])]);
    until("both hold", || gateway.routable(1) == [(0, 0), (1, 0)]);

    let (address, ..) = engine.kill();
    let death = Instant::now();
    until("masked", || gateway.routable(1) == [(1, 0)]);
    assert!(death.elapsed() < Duration::from_secs(1), "{:?}", death.elapsed());
    assert!(gateway.holds(0, &[1, 2]), "kept aside");
    assert!(!gateway.status(0, 0).eligible);

    let mut engine = Engine::start_at(&address, None);
    let batches = gateway.status(0, 0).batches;
    until("a batch of the new process arrives", || {
        engine.send(&[]);
        gateway.status(0, 0).batches > batches
    });
    until("empty", || gateway.holds(0, &[]));
    engine.send(&[stored(&[1])]);
    until("refilled", || gateway.routable(1) == [(0, 0), (1, 0)]);
    assert!(gateway.holds(0, &[1]));
    assert_eq!(gateway.status(0, 0).reconnects, 1);
}

#[test]
fn a_late_joiner_learns_the_history_in_both_reply_layouts() {
    for topic_in_replies in [true, false] {
        let mut engine = Engine::start(true);
        engine.topic_in_replies = topic_in_replies;
        engine.lose(&[stored(&[1, 2, 3])]);
        engine.lose(&[removed(&[2])]);
        let gateway = Gateway::start(4, vec![vec![engine.source(0)]]);
        until("history", || {
            engine.serve();
            gateway.holds(0, &[1, 3])
        });
        until("the replay ended", || gateway.status(0, 0).replays == 1);
        gateway.meet(&mut engine, 0, 0);
        // A gap: batches that were sent and never came.
        engine.lose(&[stored(&[5])]);
        engine.send(&[stored(&[6]), removed(&[1])]);
        until("the gap is filled", || {
            engine.serve();
            engine.send(&[]);
            gateway.holds(0, &[3, 5, 6])
        });
        let status = gateway.status(0, 0);
        assert_eq!((status.restarts, status.incomplete, status.clears, status.replay), (0, 0, 0, Replay::Works));
        assert!(status.gaps >= 1);
    }
}

#[test]
fn a_replay_proves_or_refutes_what_was_kept_aside() {
    let mut engine = Engine::start(true);
    let gateway = Gateway::start(4, vec![vec![engine.source(0)]]);
    gateway.meet(&mut engine, 0, 0);
    engine.send(&[stored(&[1, 2])]);
    until("stored", || {
        engine.serve();
        gateway.holds(0, &[1, 2])
    });
    // The network fails, the engine lives on and evicts a block meanwhile.
    let seq = engine.seq;
    let (address, replay, ring) = engine.kill();
    until("masked", || gateway.routable(1).is_empty());
    let mut engine = Engine::start_at(&address, replay.as_deref());
    (engine.seq, engine.clock, engine.ring) = (seq, 100, ring);
    engine.lose(&[removed(&[2])]);
    until("proven, and brought up to date", || {
        engine.serve();
        gateway.routable(1) == [(0, 0)] && gateway.holds(0, &[1])
    });
    assert_eq!((gateway.status(0, 0).restarts, gateway.status(0, 0).clears), (0, 0));

    // The engine restarts, and its count is where the gateway expects it.
    let next = engine.seq;
    let (address, replay, _) = engine.kill();
    until("masked again", || gateway.routable(1).is_empty());
    let mut engine = Engine::start_at(&address, replay.as_deref());
    engine.clock = 200;
    for key in 0..next {
        engine.lose(&[stored(&[100 + key])]);
    }
    let expected: Vec<u64> = (0..next).map(|key| 100 + key).collect();
    until("refuted, and learnt anew", || {
        engine.serve();
        gateway.holds(0, &expected) && gateway.routable(100) == [(0, 0)]
    });
    assert_eq!(gateway.status(0, 0).restarts, 1);
}

#[test]
fn the_blocks_of_an_engine_that_stays_away_are_given_up() {
    let mut engine = Engine::start(true);
    let ranks = vec![vec![engine.source(0)]];
    let gateway = Gateway::start_with(4, ranks, |options| options.aside = Duration::from_millis(50));
    gateway.meet(&mut engine, 0, 0);
    engine.send(&[stored(&[1, 2])]);
    until("stored", || {
        engine.serve();
        gateway.holds(0, &[1, 2])
    });
    engine.kill();
    until("given up", || gateway.holds(0, &[]));
    assert_eq!((gateway.status(0, 0).clears, gateway.status(0, 0).eligible), (1, false));
}

#[test]
fn a_missing_replay_socket_costs_nothing_but_history() {
    let mut engine = Engine::start(false);
    let mut source = engine.source(0);
    let unused = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    source.replay = Some(format!("tcp://{unused}"));
    let gateway = Gateway::start(4, vec![vec![source]]);
    gateway.meet(&mut engine, 0, 0);
    engine.send(&[stored(&[1])]);
    until("stored", || gateway.holds(0, &[1]));
    assert_eq!(gateway.status(0, 0).replay, Replay::Missing);
}

#[test]
fn a_replay_server_that_never_answers_is_given_up() {
    let mut engine = Engine::start(true);
    let gateway = Gateway::start(4, vec![vec![engine.source(0)]]);
    until("live events are applied", || {
        engine.send(&[stored(&[1])]);
        gateway.holds(0, &[1])
    });
    assert_eq!(gateway.status(0, 0).replays, 0);
    assert!(gateway.status(0, 0).eligible);
}

#[test]
fn one_ranks_clear_hides_no_other_ranks_block() {
    let mut engines = [Engine::start(false), Engine::start(false)];
    let gateway = Gateway::start(4, vec![vec![engines[0].source(0), engines[1].source(1)]]);
    for (rank, engine) in engines.iter_mut().enumerate() {
        gateway.meet(engine, 0, rank as u8);
        engine.send(&[stored(&[1, 10 + rank as u64])]);
    }
    until("the union", || gateway.holds(0, &[1, 10, 11]));
    engines[0].send(&[cleared()]);
    until("one rank cleared", || gateway.holds(0, &[1, 11]));
    assert_eq!(gateway.routable(1), [(0, 1)]);
    engines[1].send(&[removed(&[1])]);
    until("gone with its last copy", || gateway.holds(0, &[11]));
}

#[test]
fn changed_sources_are_read_anew_and_the_same_ones_undisturbed() {
    let mut engines = [Engine::start(false), Engine::start(false), Engine::start(false)];
    let mut gateway = Gateway::start(4, vec![vec![engines[0].source(0)], vec![engines[1].source(0)]]);
    for (place, engine) in engines.iter_mut().enumerate().take(2) {
        gateway.meet(engine, place as u16, 0);
        engine.send(&[stored(&[1, 20 + place as u64])]);
        until("stored", || gateway.holds(place as u16, &[1, 20 + place as u64]));
    }
    // Endpoint 0 moves, endpoint 1 stays.
    gateway.endpoints[0].ranks = vec![engines[2].source(0)];
    let sources = |gateway: &Gateway| ServiceSources {
        id: ServiceId(0),
        pool: Pool::Prompts,
        engine: shards::service::Engine::Vllm,
        block_tokens: 4,
        weights: MediumWeights::default(),
        believed: None,
        endpoints: gateway.endpoints.clone(),
    };
    gateway.ingest.update_service(sources(&gateway)).unwrap();
    until("forgotten", || gateway.holds(0, &[]));
    gateway.meet(&mut engines[2], 0, 0);
    engines[2].send(&[stored(&[7])]);
    until("read from the new address", || gateway.holds(0, &[7]));
    assert!(gateway.holds(1, &[1, 21]));
    assert_eq!(gateway.status(1, 0).reconnects, 0);
    // Endpoint 0 goes.
    gateway.endpoints.remove(0);
    gateway.ingest.update_service(sources(&gateway)).unwrap();
    until("freed", || gateway.held(0).is_empty() && gateway.ingest.status().len() == 1);
    assert_eq!(gateway.routable(1), [(1, 0)]);
    // The service goes, and the inventory with it.
    gateway.ingest.remove_service(sources(&gateway).table()).unwrap();
    until("the service is gone", || gateway.reader.enter().is_none() && gateway.ingest.status().is_empty());
}

#[test]
fn an_engine_may_connect_to_us() {
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let address = format!("tcp://{free}");
    let source = RankSource { rank: Rank(0), mode: Mode::Bind(address.clone()), replay: None };
    let gateway = Gateway::start(4, vec![vec![source]]);
    let mut engine = Engine::start(false);
    engine.publisher.connect(&address).unwrap();
    gateway.meet(&mut engine, 0, 0);
    engine.send(&[stored(&[1])]);
    until("stored", || gateway.routable(1) == [(0, 0)]);
    engine.kill();
    until("masked", || gateway.routable(1).is_empty());
}

#[test]
fn an_engine_is_reached_by_ipv6() {
    if std::net::TcpListener::bind("[::1]:0").is_err() {
        eprintln!("skipped: an_engine_is_reached_by_ipv6: this machine has no IPv6 loopback");
        return;
    }
    let mut engine = Engine::start_at("tcp://[::1]:*", Some("tcp://[::1]:*"));
    let gateway = Gateway::start(4, vec![vec![engine.source(0)]]);
    gateway.meet(&mut engine, 0, 0);
    engine.send(&[stored(&[1])]);
    until("stored", || gateway.holds(0, &[1]));
}

#[test]
fn malformed_messages_are_counted_and_cost_nothing_else() {
    let mut engine = Engine::start(false);
    let gateway = Gateway::start(4, vec![vec![engine.source(0)]]);
    gateway.meet(&mut engine, 0, 0);
    engine.send_raw(&[b"junk"]);
    engine.send_raw(&[b"", b"short", b"x"]);
    engine.send_raw(&[b"", &[0; 8], b"x", b"y", b"z", b"more"]);
    let seq = engine.seq.to_be_bytes();
    engine.send_raw(&[b"", &seq, b"\xc1"]);
    engine.seq += 1;
    engine.send(&[vec![0x05], stored(&[1]), b"\x92\xa5Later\x01".to_vec(), stored_of(&[2], 8)]);
    until("the good event is applied", || gateway.holds(0, &[1]));
    let status = gateway.status(0, 0);
    let rejects: BTreeMap<_, _> = status.rejects.iter().map(|(why, count)| (why.name(), *count)).collect();
    let expected = [("batch", 1), ("event", 1), ("field", 0), ("frames", 3), ("framing", 0), ("group", 0), ("tag", 1)];
    assert_eq!(rejects, BTreeMap::from(expected));
    assert_eq!((status.block_size_mismatches, status.engine_block_tokens), (1, Some(8)));
    assert_eq!((status.gaps, status.restarts), (0, 0));
}

#[test]
fn an_address_that_cannot_be_used_disturbs_no_other_endpoint() {
    let mut engine = Engine::start(false);
    let bad = |mode| RankSource { rank: Rank(0), mode, replay: Some("nonsense".to_owned()) };
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = format!("tcp://{}", taken.local_addr().unwrap());
    let mut without_replay = engine.source(0);
    without_replay.replay = Some("nonsense".to_owned());
    let gateway = Gateway::start(
        4,
        vec![
            vec![bad(Mode::Connect("nonsense".to_owned()))],
            vec![bad(Mode::Bind(taken))],
            vec![bad(Mode::Bind("tcp://203.0.113.1:5557".to_owned()))],
            vec![without_replay],
        ],
    );
    gateway.meet(&mut engine, 3, 0);
    engine.send(&[stored(&[1])]);
    until("stored", || gateway.holds(3, &[1]));
    assert!((0..3).all(|endpoint| !gateway.status(endpoint, 0).connected));
}

#[test]
fn other_shards_load_is_published_without_being_asked_for() {
    let gateway = Gateway::start(4, vec![]);
    let slot = LoadSlot(3);
    gateway.ingest.set_load_slots(4);
    let reserved = gateway.loads.reserve(ShardId(0), slot, 0);
    until("the other shard sees it", || gateway.loads.seen_by(ShardId(1), slot).requests() == 1);
    drop(reserved);
    until("the other shard sees it go", || gateway.loads.seen_by(ShardId(1), slot).requests() == 0);
}

#[test]
fn a_core_that_cannot_be_had_is_named() {
    for core in [1_023, 100_000] {
        let mut options = IngestOptions::new(Arc::new(LoadTable::new(1, 1)));
        options.cores = vec![core];
        let error = Ingest::start(options).unwrap_err().to_string();
        assert!(error.contains(&core.to_string()), "{error}");
    }
}

fn shared_directory() -> Option<PathBuf> {
    let fallback = || PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../shared");
    let directory = std::env::var_os("KVLANE_SHARED").map_or_else(fallback, PathBuf::from);
    directory.join("recordings").is_dir().then_some(directory)
}

fn bytes_of(hex: &str) -> Vec<u8> {
    (0..hex.len() / 2).map(|i| u8::from_str_radix(&hex[2 * i..2 * i + 2], 16).unwrap()).collect()
}

/// The key in a recording's `decoded` field: a number, or the end of a digest.
fn recorded_key(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| {
        let hex = value["$hex"].as_str().unwrap();
        u64::from_str_radix(&hex[hex.len() - 16..], 16).unwrap()
    })
}

/// The obvious model, over what the recorder decoded: a number of copies per key.
fn apply_recorded(copies: &mut BTreeMap<u64, u32>, event: &Value) {
    let keys = || event["block_hashes"].as_array().unwrap().iter().map(recorded_key);
    match event["type"].as_str().unwrap() {
        "BlockStored" => keys().for_each(|key| *copies.entry(key).or_insert(0) += 1),
        "BlockRemoved" => keys().for_each(|key| *copies.get_mut(&key).unwrap() -= 1),
        _ => copies.clear(),
    }
}

#[test]
fn recordings_of_a_real_engine_give_the_inventory_they_imply() {
    let Some(directory) = shared_directory() else {
        assert!(std::env::var_os("CI").is_none(), "recordings are missing; set KVLANE_SHARED");
        eprintln!(
            "skipped: recordings_of_a_real_engine_give_the_inventory_they_imply: no recordings; set KVLANE_SHARED"
        );
        return;
    };
    let files = std::fs::read_dir(directory.join("recordings")).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<_> = files.filter(|path| path.extension().is_some_and(|ext| ext == "json")).collect();
    files.sort();
    assert!(files.len() >= 4, "the four recordings of vLLM 0.32");
    for file in files {
        let recording: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
        let mut engine = Engine::start(false);
        let gateway =
            Gateway::start(recording["engine"]["block_size"].as_u64().unwrap() as u32, vec![vec![engine.source(0)]]);
        gateway.meet(&mut engine, 0, 0);
        let (mut copies, mut frames, mut steps) = (BTreeMap::new(), 0, 0);
        for step in recording["steps"].as_array().unwrap() {
            let none = Vec::new();
            for message in step["frames"].as_array().unwrap_or(&none) {
                let parts: Vec<_> =
                    message["frames"].as_array().unwrap().iter().map(|hex| bytes_of(hex.as_str().unwrap())).collect();
                engine.publisher.send_multipart(parts, 0).unwrap();
                frames += 1;
            }
            for batch in step["decoded"].as_array().unwrap_or(&none) {
                batch["batch"][1].as_array().unwrap().iter().for_each(|event| apply_recorded(&mut copies, event));
            }
            let expected: Vec<u64> = copies.iter().filter(|(_, n)| **n > 0).map(|(key, _)| *key).collect();
            until(&format!("{}: {}", file.display(), step["name"]), || gateway.holds(0, &expected));
            steps += 1;
        }
        let status = gateway.status(0, 0);
        assert_eq!((status.rejects.map(|(_, n)| n), status.block_size_mismatches), ([0; 7], 0), "{status:?}");
        assert_eq!(status.gaps, 0, "{status:?}");
        eprintln!("{}: {steps} steps, {frames} messages", file.file_name().unwrap().display());
    }
}

#[test]
fn a_full_stream_is_ingested_and_its_rate_printed() {
    const BLOCKS: u64 = 200_000;
    let mut engine = Engine::start(false);
    let gateway = Gateway::start(16, vec![vec![engine.source(0)]]);
    gateway.meet(&mut engine, 0, 0);
    let first = engine.seq;
    for batch in 0..BLOCKS / 32 {
        let keys: Vec<u64> = (0..32).map(|key| (batch * 32 + key + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)).collect();
        engine.lose(&[stored_of(&keys, 16)]);
    }
    let start = Instant::now();
    for (seq, payload) in engine.ring.iter().filter(|(seq, _)| *seq >= first) {
        engine.send_raw(&[b"", &seq.to_be_bytes(), payload]);
    }
    let shared = Arc::clone(&gateway.endpoints[0].shared);
    until("all are counted", || shared.kv_blocks() == BLOCKS);
    until("all are visible", || gateway.held(0).len() as u64 == BLOCKS);
    let rate = BLOCKS as f64 / start.elapsed().as_secs_f64() / 1e6;
    eprintln!("ingest over ZMQ, decode to published: {rate:.2} M blocks/s (16 tokens each, 9 bytes per token)");
}
