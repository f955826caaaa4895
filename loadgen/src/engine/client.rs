//! A small client of engines for tests: HTTP over loopback, a subscriber, a replay, and a MessagePack reader.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::{Engine, EngineHandle, EngineOptions};

/// Longest wait for anything.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// An engine on free ports that does not wait, with changed options.
pub fn start(change: impl FnOnce(&mut EngineOptions)) -> EngineHandle {
    let mut options = EngineOptions::ephemeral();
    change(&mut options);
    Engine::start(&options).expect("free ports and the embedded model need nothing")
}

pub fn connect(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).expect("the engine listens");
    stream.set_read_timeout(Some(PATIENCE)).expect("a time-out can be set");
    stream
}

/// Sends a request with more header lines, each with its line end.
pub fn send_with(stream: &mut TcpStream, method: &str, path: &str, headers: &str, body: &[u8]) {
    let length = body.len();
    let head = format!(
        "{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{headers}content-length: {length}\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body)).expect("the engine reads");
}

pub fn send(stream: &mut TcpStream, method: &str, path: &str, body: &[u8]) {
    send_with(stream, method, path, "", body);
}

/// Status and body of an answer; chunks are joined.
pub fn receive(stream: TcpStream) -> (u16, Vec<u8>) {
    let mut reader = BufReader::new(stream);
    let (mut status, mut chunked) = (0, false);
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).expect("the engine answers");
        match line.trim_end() {
            "" => break,
            line if line.starts_with("HTTP/1.1 ") => status = line[9..12].parse().expect("a status is a number"),
            line => chunked |= line.eq_ignore_ascii_case("transfer-encoding: chunked"),
        }
    }
    let mut body = Vec::new();
    if !chunked {
        reader.read_to_end(&mut body).expect("the engine answers to the end");
        return (status, body);
    }
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).expect("a chunk has a size");
        let size = usize::from_str_radix(line.trim_end(), 16).expect("a chunk size is hex");
        let mut chunk = vec![0; size + 2];
        reader.read_exact(&mut chunk).expect("a chunk is as long as it says");
        if size == 0 {
            return (status, body);
        }
        body.extend_from_slice(&chunk[..size]);
    }
}

pub fn call(engine: &EngineHandle, method: &str, path: &str, body: &[u8]) -> (u16, Vec<u8>) {
    let mut stream = connect(engine.http_addr);
    send(&mut stream, method, path, body);
    receive(stream)
}

pub fn post(engine: &EngineHandle, path: &str, body: Value) -> Value {
    let (status, body) = call(engine, "POST", path, body.to_string().as_bytes());
    assert_eq!(status, 200, "{}", String::from_utf8_lossy(&body));
    serde_json::from_slice(&body).expect("the answer is JSON")
}

pub fn get(engine: &EngineHandle, path: &str) -> Value {
    let (status, body) = call(engine, "GET", path, b"");
    assert_eq!(status, 200);
    serde_json::from_slice(&body).expect("the answer is JSON")
}

/// Asks until the answer is yes.
pub fn eventually(what: &str, mut check: impl FnMut() -> bool) {
    let start = Instant::now();
    while !check() {
        assert!(start.elapsed() < PATIENCE, "{what} did not happen");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// A subscriber of one rank that is known to be connected.
pub struct Subscriber {
    socket: zmq::Socket,
    _context: zmq::Context,
}

impl Subscriber {
    pub fn of(engine: &EngineHandle, rank: u16) -> Self {
        let context = zmq::Context::new();
        let socket = context.socket(zmq::SUB).expect("a socket");
        socket.set_linger(0).and_then(|()| socket.set_rcvtimeo(PATIENCE.as_millis() as i32)).expect("options");
        socket.set_subscribe(b"").expect("a subscription");
        let mut address = engine.event_addr.expect("it is bound");
        address.set_port(address.port() + rank);
        let subscriber = Self { socket, _context: context };
        subscriber.socket.connect(&format!("tcp://{address}")).expect("the address is right");
        subscriber
    }

    /// Whether a message is there, or comes soon.
    pub fn is_ready(&self) -> bool {
        self.socket.poll(zmq::POLLIN, 20).is_ok_and(|ready| ready > 0)
    }

    /// The next message: its number and its payload.
    pub fn next(&self) -> (u64, Vec<u8>) {
        let mut frames = self.socket.recv_multipart(0).expect("the stream goes on");
        let payload = frames.pop().expect("three frames");
        (u64::from_be_bytes(frames[1].as_slice().try_into().expect("8 bytes")), payload)
    }
}

/// Asks a rank's replay socket for everything from `start`; the messages without their delimiter, end marker included.
pub fn replay_of(engine: &EngineHandle, rank: u16, start: u64) -> Vec<Vec<Vec<u8>>> {
    let context = zmq::Context::new();
    let socket = context.socket(zmq::DEALER).expect("a socket");
    socket.set_linger(0).and_then(|()| socket.set_rcvtimeo(PATIENCE.as_millis() as i32)).expect("options");
    let mut address = engine.replay_addr.expect("replay is on");
    address.set_port(address.port() + rank);
    socket.connect(&format!("tcp://{address}")).expect("the address is right");
    socket.send_multipart([Vec::new(), start.to_be_bytes().to_vec()], 0).expect("it is sent");
    let mut messages = Vec::new();
    loop {
        let mut frames = socket.recv_multipart(0).expect("replay answers to its end");
        assert!(frames.remove(0).is_empty(), "the delimiter is first");
        let end = frames.iter().any(|frame| *frame == u64::MAX.to_be_bytes());
        messages.push(frames);
        if end {
            return messages;
        }
    }
}

/// Decodes a whole payload.
pub fn decode_all(payload: &[u8]) -> Value {
    let mut rest = payload;
    let value = decode(&mut rest);
    assert!(rest.is_empty(), "a payload is one value");
    value
}

/// As much MessagePack as engines write.
fn decode(bytes: &mut &[u8]) -> Value {
    fn take<'a>(bytes: &mut &'a [u8], count: usize) -> &'a [u8] {
        let (head, rest) = bytes.split_at(count);
        *bytes = rest;
        head
    }
    fn number(bytes: &mut &[u8], count: usize) -> u64 {
        take(bytes, count).iter().fold(0, |number, byte| number << 8 | u64::from(*byte))
    }
    let list = |bytes: &mut &[u8], count: u64| Value::Array((0..count).map(|_| decode(bytes)).collect());
    let text = |bytes: &mut &[u8], count: usize| Value::from(String::from_utf8_lossy(take(bytes, count)).into_owned());
    let map = |bytes: &mut &[u8], count: u64| {
        let pair = |_| (decode(bytes).as_str().expect("keys are strings").to_owned(), decode(bytes));
        Value::Object((0..count).map(pair).collect())
    };
    match number(bytes, 1) as u8 {
        byte @ 0..=0x7f => Value::from(byte),
        byte @ 0x80..=0x8f => map(bytes, u64::from(byte & 15)),
        byte @ 0x90..=0x9f => list(bytes, u64::from(byte & 15)),
        byte @ 0xa0..=0xbf => text(bytes, usize::from(byte & 31)),
        0xc0 => Value::Null,
        0xcb => Value::from(f64::from_bits(number(bytes, 8))),
        byte @ 0xcc..=0xcf => Value::from(number(bytes, 1 << (byte - 0xcc))),
        byte @ 0xd0..=0xd3 => {
            let width = 1 << (byte - 0xd0);
            let shift = 64 - 8 * width as u32;
            Value::from((number(bytes, width) << shift).cast_signed() >> shift)
        }
        byte @ 0xdc..=0xdd => {
            let count = number(bytes, 2 << (byte - 0xdc));
            list(bytes, count)
        }
        0xde => {
            let count = number(bytes, 2);
            map(bytes, count)
        }
        byte @ 0xe0.. => Value::from(byte.cast_signed()),
        byte => panic!("the engine does not write {byte:02x}"),
    }
}
