//! A small blocking HTTP/1.1 client that shows what a connection really carried.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

/// One answer.
#[derive(Debug, Clone)]
pub struct Answer {
    /// Status code.
    pub status: u16,
    /// Headers in order, names in lower case.
    pub headers: Vec<(String, String)>,
    /// Body, chunk framing removed.
    pub body: Vec<u8>,
}

impl Answer {
    /// The first header of that name (lower case).
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(n, _)| n == name).map(|(_, value)| value.as_str())
    }

    /// The body as JSON.
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|e| panic!("no JSON ({e}): {}", String::from_utf8_lossy(&self.body)))
    }

    /// Whether it says that something was done, with no warning but that rules end with the process.
    pub fn is_success(&self) -> bool {
        self.status == 200 && is_success(&self.json())
    }

    /// The body as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }
}

/// See [`Answer::is_success`].
pub fn is_success(answer: &serde_json::Value) -> bool {
    let mut answer = answer.clone();
    let map = answer.as_object_mut().expect("an object");
    if let Some(serde_json::Value::Array(warnings)) = map.get_mut("warnings") {
        warnings.retain(|warning| !warning.as_str().is_some_and(|text| text.contains("end with the process")));
        if warnings.is_empty() {
            map.remove("warnings");
        }
    }
    answer == serde_json::json!({"result": "Success"})
}

/// One connection.
pub struct Connection {
    reader: BufReader<TcpStream>,
}

impl Connection {
    /// Connects.
    pub fn open(address: SocketAddr) -> std::io::Result<Self> {
        let stream = TcpStream::connect_timeout(&address, Duration::from_secs(5))?;
        // The end of a failed test: 8 MiB of prompt take a machine with much to do longer than a minute.
        stream.set_read_timeout(Some(Duration::from_secs(240)))?;
        stream.set_nodelay(true)?;
        Ok(Connection { reader: BufReader::new(stream) })
    }

    /// What comes next, byte by byte.
    pub fn reader(&mut self) -> &mut impl Read {
        &mut self.reader
    }

    /// The socket below.
    pub fn stream(&self) -> &TcpStream {
        self.reader.get_ref()
    }

    /// Sends bytes as they are.
    pub fn send(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        self.reader.get_mut().write_all(bytes)
    }

    /// Sends a request with a Content-Length body.
    pub fn request(&mut self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> std::io::Result<()> {
        let mut head = format!("{method} {path} HTTP/1.1\r\nHost: test\r\n");
        for (name, value) in headers {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        if !body.is_empty() || method == "POST" {
            head.push_str(&format!("Content-Length: {}\r\n", body.len()));
        }
        head.push_str("\r\n");
        let mut bytes = head.into_bytes();
        bytes.extend_from_slice(body);
        self.send(&bytes)
    }

    /// Reads an answer's head.
    pub fn head(&mut self) -> std::io::Result<Answer> {
        let line = self.line()?;
        let status = line.split(' ').nth(1).and_then(|s| s.parse().ok()).ok_or_else(|| bad(&line))?;
        let mut headers = Vec::new();
        loop {
            let line = self.line()?;
            if line.is_empty() {
                return Ok(Answer { status, headers, body: Vec::new() });
            }
            let (name, value) = line.split_once(':').ok_or_else(|| bad(&line))?;
            headers.push((name.to_ascii_lowercase(), value.trim().to_owned()));
        }
    }

    /// Reads a whole answer; an answer that ends early is an error.
    pub fn answer(&mut self) -> std::io::Result<Answer> {
        let mut answer = self.head()?;
        if answer.status == 100 {
            answer = self.head()?;
        }
        if answer.header("transfer-encoding").is_some_and(|v| v.eq_ignore_ascii_case("chunked")) {
            while let Some(mut chunk) = self.chunk()? {
                answer.body.append(&mut chunk);
            }
        } else if let Some(length) = answer.header("content-length").and_then(|v| v.parse().ok()) {
            answer.body = vec![0; length];
            self.reader.read_exact(&mut answer.body)?;
        } else if answer.status != 204 && answer.status != 304 {
            self.reader.read_to_end(&mut answer.body)?;
        }
        Ok(answer)
    }

    /// Reads what is left of an answer's body, as far as it comes; whether its end did.
    pub fn rest(&mut self, answer: &mut Answer) -> bool {
        if answer.header("transfer-encoding").is_some() {
            loop {
                match self.chunk() {
                    Ok(Some(mut chunk)) => answer.body.append(&mut chunk),
                    Ok(None) => return true,
                    Err(_) => return false,
                }
            }
        }
        let length: usize = answer.header("content-length").and_then(|text| text.parse().ok()).expect("a length");
        let left = (length - answer.body.len()) as u64;
        let read = (&mut self.reader).take(left).read_to_end(&mut answer.body);
        read.is_ok() && answer.body.len() == length
    }

    /// Reads one chunk of a chunked body; none after the last.
    pub fn chunk(&mut self) -> std::io::Result<Option<Vec<u8>>> {
        let line = self.line()?;
        let size = usize::from_str_radix(line.split(';').next().unwrap_or("").trim(), 16).map_err(|_| bad(&line))?;
        let mut chunk = vec![0; size];
        self.reader.read_exact(&mut chunk)?;
        loop {
            let line = self.line()?;
            if line.is_empty() {
                return Ok((size > 0).then_some(chunk));
            }
            if size > 0 {
                return Err(bad(&line));
            }
        }
    }

    fn line(&mut self) -> std::io::Result<String> {
        let mut line = String::new();
        if self.reader.read_line(&mut line)? == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        match line.strip_suffix("\r\n") {
            Some(line) => Ok(line.to_owned()),
            None => Err(bad(&line)),
        }
    }
}

fn bad(line: &str) -> std::io::Error {
    std::io::Error::new(std::io::ErrorKind::InvalidData, format!("not HTTP: {line:?}"))
}

/// One request on a connection of its own.
pub fn call(address: SocketAddr, method: &str, path: &str, body: &[u8]) -> std::io::Result<Answer> {
    let mut connection = Connection::open(address)?;
    connection.request(method, path, &[("Content-Type", "application/json"), ("Connection", "close")], body)?;
    connection.answer()
}

/// A JSON POST on a connection of its own.
pub fn post(address: SocketAddr, path: &str, body: &serde_json::Value) -> Answer {
    call(address, "POST", path, body.to_string().as_bytes()).unwrap_or_else(|e| panic!("POST {path}: {e}"))
}

/// A GET on a connection of its own.
pub fn get(address: SocketAddr, path: &str) -> Answer {
    call(address, "GET", path, b"").unwrap_or_else(|e| panic!("GET {path}: {e}"))
}
