//! A shard on loopback, engines made of plain threads, and a client that sees bytes.
#![allow(dead_code, reason = "each test file uses its own part")]

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};

use shards::executor::{Aside, Rung};
use shards::ids::{EndpointIndex, ServiceId, ShardId};
use shards::limits::Limits;
use shards::load::{LoadSlot, LoadTable};
use shards::prompt::{Model, ModelFiles};
use shards::service::{Endpoint, EndpointShared, Service, Tables};
use shards::shard::{Command, ShardHandle, ShardOptions, spawn};

/// Longest wait for anything; a test that reaches it fails.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// The drivers every behaviour is checked on.
pub const RUNGS: [Rung; 2] = [Rung::DeferTaskrun, Rung::Epoll];

/// One shard with one rule.
pub struct Gateway {
    pub shard: ShardHandle,
    pub address: SocketAddr,
    pub service: Arc<Service>,
    pub loads: Arc<LoadTable>,
}

/// Limits small enough to be met in a test.
pub fn limits() -> Limits {
    Limits { connect_timeout: Duration::from_secs(5), ..Limits::default() }
}

pub fn send(shard: &ShardHandle, command: Command) {
    shard.send(command).expect("the shard takes commands").wait(PATIENCE).expect("the command takes effect");
}

/// The tokenizer of the demo, which is part of this repository.
pub fn model() -> Arc<Model> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../loadgen/assets/tokenizer/kvlane-demo");
    let files = ModelFiles {
        slug: "m".into(),
        tokenizer: std::fs::read_to_string(path.join("tokenizer.json")).expect("the demo's tokenizer"),
        path,
        config: None,
        template: None,
        tool_template: None,
    };
    Arc::new(Model::load(&files, SystemTime::now).expect("a usable tokenizer"))
}

/// A service over endpoints that are up.
pub fn service(id: u32, listen: SocketAddr, endpoints: &[SocketAddr]) -> Service {
    let shared = |index| EndpointShared::new(EndpointIndex(index as u16), LoadSlot(index as u32), 1);
    let endpoint = |(index, address): (usize, &SocketAddr)| Endpoint::at(*address, shared(index));
    Service::plain(ServiceId(id), listen, endpoints.iter().enumerate().map(endpoint).collect(), 1)
}

impl Gateway {
    pub fn start(rung: Rung, limits: Limits, endpoints: &[SocketAddr]) -> Gateway {
        Self::start_with(rung, limits, |listen| vec![service(0, listen, endpoints)])
    }

    pub fn start_with(rung: Rung, limits: Limits, services: impl Fn(SocketAddr) -> Vec<Service>) -> Gateway {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        let loads = Arc::new(LoadTable::new(1, 16));
        let shard = spawn(ShardOptions {
            id: ShardId(0),
            core: None,
            ring_entries: 256,
            first_rung: rung,
            limits,
            loads: Arc::clone(&loads),
            claims: Arc::default(),
            affinity: shards::affinity::Affinity::new().0,
            aside: Some(Aside::start().expect("a thread")),
        })
        .expect("the shard starts");
        let services: Vec<Arc<Service>> = services(address).into_iter().map(Arc::new).collect();
        let service = Arc::clone(&services[0]);
        let tables = Tables { services, models: Arc::default() };
        send(&shard, Command::Tables(Arc::new(tables)));
        send(&shard, Command::Listen(address, listener));
        Gateway { shard, address, service, loads }
    }

    pub fn connect(&self) -> Client {
        Client::connect(self.address)
    }

    /// Requests in flight at all endpoints.
    pub fn in_flight(&self) -> u32 {
        (0..16).map(|slot| self.loads.total(LoadSlot(slot)).requests()).sum()
    }

    /// Ends the shard, checking that nothing is left behind.
    pub fn stop(self) {
        eventually("in-flight counts return to 0", || self.in_flight() == 0);
        let receipt = self.shard.send(Command::Drain(Duration::from_secs(2))).expect("the shard takes commands");
        receipt.wait(PATIENCE).expect("the shard drains");
        assert!(!self.shard.failed());
        self.shard.join();
    }
}

pub fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < PATIENCE, "{what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// A connection whose bytes a test writes and reads.
pub struct Client {
    pub stream: TcpStream,
    buffer: Vec<u8>,
    /// Writing to a peer that has left is no failure; so for engines.
    forgiving: bool,
}

/// A message: its head as text, its body without chunks, and how it ended.
#[derive(Debug)]
pub struct Message {
    pub head: String,
    pub body: Vec<u8>,
    /// The body's bytes with their framing.
    pub raw: Vec<u8>,
    /// The connection ended before the message did.
    pub broken: bool,
}

impl Message {
    pub fn status(&self) -> u16 {
        self.head.split(' ').nth(1).and_then(|code| code.parse().ok()).unwrap_or(0)
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.head.lines().skip(1).find_map(|line| {
            let (key, value) = line.split_once(':')?;
            key.eq_ignore_ascii_case(name).then(|| value.trim())
        })
    }
}

impl Client {
    pub fn connect(address: SocketAddr) -> Client {
        Client::new(TcpStream::connect(address).expect("a connection"))
    }

    pub fn new(stream: TcpStream) -> Client {
        stream.set_read_timeout(Some(PATIENCE)).expect("a time-out");
        stream.set_write_timeout(Some(PATIENCE)).expect("a time-out");
        stream.set_nodelay(true).expect("no delay");
        Client { stream, buffer: Vec::new(), forgiving: false }
    }

    pub fn send(&mut self, bytes: impl AsRef<[u8]>) {
        let sent = self.stream.write_all(bytes.as_ref());
        assert!(self.forgiving || sent.is_ok(), "the peer takes bytes: {sent:?}");
    }

    /// Reads more; false at the end of the connection, however it came.
    fn fill(&mut self) -> bool {
        let mut part = [0; 16 * 1024];
        match self.stream.read(&mut part) {
            Ok(0) => false,
            Ok(count) => {
                self.buffer.extend_from_slice(&part[..count]);
                true
            }
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                panic!("the peer is silent; so far: {:?}", String::from_utf8_lossy(&self.buffer))
            }
            Err(_) => false,
        }
    }

    /// Reads until the bytes are there, and takes everything up to and with them.
    pub fn read_until(&mut self, end: &[u8]) -> Option<Vec<u8>> {
        loop {
            if let Some(at) = self.buffer.windows(end.len()).position(|window| window == end) {
                return Some(self.buffer.drain(..at + end.len()).collect());
            }
            if !self.fill() {
                return None;
            }
        }
    }

    fn read_exact(&mut self, count: usize) -> Option<Vec<u8>> {
        while self.buffer.len() < count {
            if !self.fill() {
                return None;
            }
        }
        Some(self.buffer.drain(..count).collect())
    }

    /// The next message; none when the connection ends before its head is complete.
    pub fn read_message(&mut self) -> Option<Message> {
        let head = String::from_utf8(self.read_until(b"\r\n\r\n")?).expect("a head is text");
        let mut message = Message { head, body: Vec::new(), raw: Vec::new(), broken: false };
        let is_response = message.head.starts_with("HTTP/");
        if message.header("transfer-encoding").is_some() {
            message.broken = self.read_chunks(&mut message).is_none();
        } else if let Some(length) = message.header("content-length").map(|text| text.parse().expect("a length")) {
            match self.read_exact(length) {
                Some(body) => message.body = body,
                None => (message.broken, message.body) = (true, std::mem::take(&mut self.buffer)),
            }
        } else if is_response && message.status() >= 200 {
            while self.fill() {}
            message.body = std::mem::take(&mut self.buffer);
        }
        if message.raw.is_empty() {
            message.raw = message.body.clone();
        }
        Some(message)
    }

    fn read_chunks(&mut self, message: &mut Message) -> Option<()> {
        loop {
            let line = self.read_until(b"\r\n")?;
            message.raw.extend_from_slice(&line);
            let digits = String::from_utf8_lossy(&line).trim_end().split(';').next().map(str::to_owned)?;
            let size = usize::from_str_radix(digits.trim(), 16).expect("a chunk size");
            if size == 0 {
                loop {
                    let line = self.read_until(b"\r\n")?;
                    message.raw.extend_from_slice(&line);
                    if line == b"\r\n" {
                        return Some(());
                    }
                }
            }
            let data = self.read_exact(size + 2)?;
            message.raw.extend_from_slice(&data);
            message.body.extend_from_slice(&data[..size]);
        }
    }

    /// Sends a request and reads its answer.
    pub fn ask(&mut self, request: impl AsRef<[u8]>) -> Message {
        self.send(request);
        self.read_message().expect("an answer")
    }

    /// Whether the peer ends the connection and sends nothing more before.
    pub fn ends(&mut self) -> bool {
        self.buffer.is_empty() && !self.fill()
    }
}

/// A server in plain threads: one per connection, each running the handler.
pub struct Engine {
    pub address: SocketAddr,
    /// Heads of requests as they came.
    pub heads: Arc<Mutex<Vec<String>>>,
    /// Bodies of requests as they came.
    pub bodies: Arc<Mutex<Vec<Vec<u8>>>>,
    /// Connections accepted.
    pub connections: Arc<AtomicUsize>,
    /// Connections whose peer has left.
    pub left: Arc<AtomicUsize>,
    /// Connections closed by the handler's word.
    pub closed: Arc<AtomicUsize>,
}

/// What a handler is given.
pub struct Served<'a> {
    pub client: &'a mut Client,
    pub request: Message,
    /// Number of the connection, from 0.
    pub connection: usize,
    /// Number of the request on the connection, from 0.
    pub turn: usize,
}

impl Engine {
    /// The handler returns whether the connection goes on.
    pub fn start(handler: impl Fn(Served<'_>) -> bool + Send + Sync + 'static) -> Engine {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let engine = Engine {
            address: listener.local_addr().expect("an address"),
            heads: Arc::default(),
            bodies: Arc::default(),
            connections: Arc::default(),
            left: Arc::default(),
            closed: Arc::default(),
        };
        let (heads, bodies) = (Arc::clone(&engine.heads), Arc::clone(&engine.bodies));
        let (connections, left) = (Arc::clone(&engine.connections), Arc::clone(&engine.left));
        let closed = Arc::clone(&engine.closed);
        let handler = Arc::new(handler);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let Ok(stream) = stream else { return };
                let connection = connections.fetch_add(1, Ordering::SeqCst);
                let (heads, bodies, left) = (Arc::clone(&heads), Arc::clone(&bodies), Arc::clone(&left));
                let (handler, closed) = (Arc::clone(&handler), Arc::clone(&closed));
                std::thread::spawn(move || {
                    let mut client = Client::new(stream);
                    client.forgiving = true;
                    for turn in 0.. {
                        let Some(request) = client.read_message() else {
                            left.fetch_add(1, Ordering::SeqCst);
                            return;
                        };
                        heads.lock().expect("no panic").push(request.head.clone());
                        bodies.lock().expect("no panic").push(request.body.clone());
                        if !handler(Served { client: &mut client, request, connection, turn }) {
                            drop(client);
                            closed.fetch_add(1, Ordering::SeqCst);
                            return;
                        }
                    }
                });
            }
        });
        engine
    }

    /// An engine that answers every request with its body's length and a name.
    pub fn echo(name: &'static str) -> Engine {
        Engine::start(move |served| {
            let body = format!("{name} {}", served.request.body.len());
            served.client.send(answer(&body));
            true
        })
    }
}

pub fn answer(body: &str) -> String {
    format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\nX-Engine: 1\r\n\r\n{body}", body.len())
}

pub fn post(path: &str, body: &[u8]) -> Vec<u8> {
    let mut request =
        format!("POST {path} HTTP/1.1\r\nHost: gateway\r\nContent-Length: {}\r\n\r\n", body.len()).into_bytes();
    request.extend_from_slice(body);
    request
}

pub const GET: &str = "GET /x HTTP/1.1\r\nHost: gateway\r\n\r\n";

/// An address where nobody listens.
pub fn dead_address() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.local_addr().expect("an address")
}

/// Ends both directions at once.
pub fn leave(client: Client) {
    let _gone = client.stream.shutdown(Shutdown::Both);
}
