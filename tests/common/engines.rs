//! Stand-ins for engines: an HTTP server that notes what it gets, and a ZMQ publisher for recorded frames.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex};

/// A request as it arrived.
#[derive(Clone, Debug)]
pub struct Seen {
    /// Method and path, as in the request line.
    pub line: String,
    /// Header lines in order.
    pub headers: Vec<String>,
    /// Body, chunk framing removed.
    pub body: Vec<u8>,
}

/// An HTTP server that answers every request with 200 and a small JSON object, and notes all but the gateway's own.
pub struct StubEngine {
    /// Where it listens.
    pub address: SocketAddr,
    /// A port for its events that nothing is bound to: it has none.
    pub event_port: u16,
    seen: Arc<Mutex<Vec<Seen>>>,
    /// The other ends of its connections; none once it has stopped.
    open: Arc<Mutex<Option<Vec<TcpStream>>>>,
}

impl StubEngine {
    /// Starts on a free port; its threads end with the process.
    pub fn start() -> Self {
        Self::start_as(Persona::default())
    }

    /// Starts one that describes itself.
    pub fn start_as(persona: Persona) -> Self {
        let persona = Arc::new(persona);
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("loopback has a free port");
        let address = listener.local_addr().expect("a bound socket has an address");
        let seen = Arc::new(Mutex::new(Vec::new()));
        let notes = Arc::clone(&seen);
        let open = Arc::new(Mutex::new(Some(Vec::new())));
        let connections = Arc::clone(&open);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let Some(open) = &mut *connections.lock().expect("no holder panics") else { return };
                open.extend(stream.try_clone());
                let (notes, persona) = (Arc::clone(&notes), Arc::clone(&persona));
                std::thread::spawn(move || serve(stream, &notes, &persona));
            }
        });
        StubEngine { address, event_port: super::free_port(), seen, open }
    }

    /// Ends its connections, and refuses others from then on.
    pub fn stop(&self) {
        let open = self.open.lock().expect("no holder panics").take();
        for connection in open.into_iter().flatten() {
            // One that has ended already may say so.
            let _ended = connection.shutdown(std::net::Shutdown::Both);
        }
        // Wakes the thread that accepts.
        drop(TcpStream::connect(self.address));
        super::wait_for("the stub refuses connections", || TcpStream::connect(self.address).err());
    }

    /// What has arrived so far.
    pub fn seen(&self) -> Vec<Seen> {
        self.seen.lock().expect("no holder panics").clone()
    }
}

/// What a stub says of itself when the gateway asks.
#[derive(Default)]
pub struct Persona {
    /// Bodies by path; other paths get the same answer as everything.
    pub answers: Vec<(&'static str, String)>,
    /// What the gateway's own calls must show as a bearer token; without it they are answered 401.
    pub token: Option<&'static str>,
    /// Answers to all but the gateway's own calls begin at once and end when the gate lets them.
    pub gate: Option<Arc<Gate>>,
    /// They do not even begin before.
    pub silent: bool,
    /// There are none: whatever is asked ends the connection.
    pub dies: bool,
}

/// Holds answers back.
#[derive(Default)]
pub struct Gate {
    permits: Mutex<usize>,
    changed: Condvar,
}

impl Gate {
    /// Lets one answer come to its end.
    pub fn release(&self) {
        *self.permits.lock().expect("no holder panics") += 1;
        self.changed.notify_one();
    }

    fn pass(&self) {
        let permits = self.permits.lock().expect("no holder panics");
        let mut permits = self.changed.wait_while(permits, |permits| *permits == 0).expect("no holder panics");
        *permits -= 1;
    }
}

impl Persona {
    /// The status and body for one of the gateway's own calls.
    fn answer(&self, seen: &Seen) -> Option<(&'static str, &str)> {
        let shown = |token: &str| seen.headers.iter().any(|header| *header == format!("Authorization: Bearer {token}"));
        if self.token.is_some_and(|token| !shown(token)) {
            return Some(("401 Unauthorized", "{}"));
        }
        let path = seen.line.split(' ').nth(1)?;
        self.answers.iter().find(|(known, _)| *known == path).map(|(_, body)| ("200 OK", body.as_str()))
    }
}

fn serve(stream: TcpStream, notes: &Mutex<Vec<Seen>>, persona: &Persona) -> Option<()> {
    let mut writer = stream.try_clone().ok()?;
    let mut reader = BufReader::new(stream);
    loop {
        let seen = read_request(&mut reader)?;
        let own = seen.headers.iter().any(|header| header == "User-Agent: kvlane");
        let usual = if seen.line.starts_with("GET /v1/models") {
            r#"{"object":"list","data":[]}"#
        } else {
            r#"{"object":"text_completion","choices":[]}"#
        };
        let described = if own { persona.answer(&seen) } else { None };
        let (status, body) = described.unwrap_or(("200 OK", usual));
        if !own {
            notes.lock().ok()?.push(seen);
            if persona.dies {
                return writer.shutdown(std::net::Shutdown::Both).ok();
            }
            if let Some(gate) = persona.gate.as_ref().filter(|_| persona.silent) {
                gate.pass();
            } else if let Some(gate) = &persona.gate {
                writer.write_all(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n").ok()?;
                gate.pass();
                writer.write_all(b"1\r\n}\r\n0\r\n\r\n").ok()?;
                continue;
            }
        }
        let head =
            format!("HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n", body.len());
        writer.write_all(head.as_bytes()).ok()?;
        writer.write_all(body.as_bytes()).ok()?;
    }
}

fn read_request(reader: &mut BufReader<TcpStream>) -> Option<Seen> {
    let line = read_line(reader)?;
    let mut headers = Vec::new();
    loop {
        let header = read_line(reader)?;
        if header.is_empty() {
            break;
        }
        headers.push(header);
    }
    let value_of = |name: &str| {
        headers.iter().find_map(|h| {
            let (n, v) = h.split_once(':')?;
            n.eq_ignore_ascii_case(name).then(|| v.trim().to_owned())
        })
    };
    let mut body = Vec::new();
    if value_of("transfer-encoding").is_some_and(|v| v.eq_ignore_ascii_case("chunked")) {
        loop {
            let size = usize::from_str_radix(read_line(reader)?.trim(), 16).ok()?;
            let start = body.len();
            body.resize(start + size, 0);
            reader.read_exact(&mut body[start..]).ok()?;
            read_line(reader)?;
            if size == 0 {
                break;
            }
        }
    } else if let Some(length) = value_of("content-length").and_then(|v| v.parse().ok()) {
        body.resize(length, 0);
        reader.read_exact(&mut body).ok()?;
    }
    Some(Seen { line, headers, body })
}

fn read_line(reader: &mut BufReader<TcpStream>) -> Option<String> {
    let mut line = String::new();
    (reader.read_line(&mut line).ok()? > 0).then(|| line.trim_end_matches(['\r', '\n']).to_owned())
}

/// A ZMQ PUB socket that sends frames as they were recorded.
pub struct Publisher {
    socket: zmq::Socket,
    _context: zmq::Context,
    /// Its port on 127.0.0.1.
    pub port: u16,
}

impl Publisher {
    /// Binds a free port.
    pub fn start() -> Self {
        let context = zmq::Context::new();
        let socket = context.socket(zmq::XPUB).expect("a fresh context has room for a socket");
        socket.set_linger(0).expect("linger is an option of every socket");
        socket.bind("tcp://127.0.0.1:*").expect("loopback has a free port");
        let endpoint = socket.get_last_endpoint().expect("a bound socket has an endpoint").expect("it is text");
        let port = endpoint.rsplit(':').next().and_then(|p| p.parse().ok()).expect("the endpoint ends in a port");
        Publisher { socket, _context: context, port }
    }

    /// Waits until someone subscribed (an XPUB socket is told).
    pub fn wait_for_subscriber(&self) {
        self.socket.set_rcvtimeo(super::PATIENCE.as_millis() as i32).expect("a time-out is an option");
        let message = self.socket.recv_bytes(0).expect("a subscriber comes");
        assert_eq!(message.first(), Some(&1), "the message is a subscription");
    }

    /// Sends one message.
    pub fn send(&self, frames: &[Vec<u8>]) {
        self.socket.send_multipart(frames, 0).expect("a bound PUB socket takes messages");
    }
}

/// Bytes of a hex string.
pub fn unhex(text: &str) -> Vec<u8> {
    assert!(text.len().is_multiple_of(2), "hex has two digits a byte: {text:?}");
    (0..text.len()).step_by(2).map(|i| u8::from_str_radix(&text[i..i + 2], 16).expect("hex digits")).collect()
}
