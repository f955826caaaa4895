//! An engine that answers at once with fixed bytes, and the closed-loop load: both as cheap as they can be, since
//! only the proxy between them is measured.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use anyhow::Context;
use loadgen::workload::Random;
use monoio::io::{AsyncReadRent, AsyncWriteRentExt};
use monoio::net::{TcpListener, TcpStream};

use super::bodies::{CONVERSATIONS, Conversations};
use super::cpu;

/// Bytes of one read.
const READ_BYTES: usize = 64 * 1024;

/// What a completion is answered with.
const COMPLETION: &str = "{\"id\":\"cmpl-0\",\"object\":\"chat.completion\",\"created\":0,\"model\":\"m\",\"choices\":[{\"index\":0,\
    \"message\":{\"role\":\"assistant\",\"content\":\"ok\"},\"finish_reason\":\"length\"}],\"usage\":{\"prompt_tokens\":1,\
    \"completion_tokens\":1,\"total_tokens\":2}}";

/// What any GET is answered with: good enough for health checks and for the list of models.
const MODELS: &str = "{\"object\":\"list\",\"data\":[{\"id\":\"kvlane/demo\",\"object\":\"model\"}]}";

fn answer(body: &str) -> Vec<u8> {
    let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length";
    format!("{head}: {}\r\n\r\n{body}", body.len()).into_bytes()
}

fn on_core<F: Future<Output = ()>>(core: usize, task: impl FnOnce() -> F) {
    cpu::pin(core).expect("the core was checked at the start");
    let mut runtime =
        monoio::RuntimeBuilder::<monoio::FusionDriver>::new().enable_timer().build().expect("a runtime starts here");
    runtime.block_on(task());
}

/// Serves fixed answers on `count` loopback ports, on a thread of its own, until the process ends.
pub fn start(count: usize, core: usize) -> anyhow::Result<Vec<SocketAddr>> {
    let listeners: Result<Vec<_>, _> = (0..count).map(|_| std::net::TcpListener::bind("127.0.0.1:0")).collect();
    let listeners = listeners.context("the backend cannot bind")?;
    let addresses: Result<Vec<_>, _> = listeners.iter().map(std::net::TcpListener::local_addr).collect();
    for listener in &listeners {
        listener.set_nonblocking(true)?;
    }
    std::thread::Builder::new().name("backend".to_owned()).spawn(move || {
        on_core(core, || async {
            let accepting = listeners.into_iter().map(|listener| monoio::spawn(accept(listener)));
            for task in accepting.collect::<Vec<_>>() {
                task.await;
            }
        });
    })?;
    Ok(addresses?)
}

async fn accept(listener: std::net::TcpListener) {
    let listener = TcpListener::from_std(listener).expect("the socket listens and does not block");
    while let Ok((stream, _)) = listener.accept().await {
        monoio::spawn(serve(stream));
    }
}

/// Answers one request after the other. Only the head's first byte and length are looked at.
async fn serve(mut stream: TcpStream) {
    let _ = stream.set_nodelay(true);
    let (completion, models) = (answer(COMPLETION), answer(MODELS));
    let (mut pending, mut buffer) = (Vec::new(), vec![0; READ_BYTES]);
    // Body bytes of the request under way that are still to come.
    let mut body_left = 0usize;
    loop {
        let (result, returned) = stream.read(buffer).await;
        buffer = returned;
        let Ok(read @ 1..) = result else { return };
        let mut bytes = &buffer[..read];
        if body_left > 0 {
            let take = body_left.min(bytes.len());
            body_left -= take;
            bytes = &bytes[take..];
            if body_left > 0 {
                continue;
            }
            if stream.write_all(completion.clone()).await.0.is_err() {
                return;
            }
        }
        pending.extend_from_slice(bytes);
        while let Some(head) = head_length(&pending) {
            let get = pending.first() == Some(&b'G');
            let length = content_length(&pending[..head]).unwrap_or(0);
            let have = (pending.len() - head).min(length);
            pending.drain(..head + have);
            body_left = length - have;
            if body_left > 0 {
                break;
            }
            let bytes = if get { models.clone() } else { completion.clone() };
            if stream.write_all(bytes).await.0.is_err() {
                return;
            }
        }
    }
}

fn head_length(bytes: &[u8]) -> Option<usize> {
    bytes.windows(4).position(|four| four == b"\r\n\r\n").map(|end| end + 4)
}

fn content_length(head: &[u8]) -> Option<usize> {
    const NAME: &[u8] = b"content-length:";
    let at = head.windows(NAME.len()).position(|part| part.eq_ignore_ascii_case(NAME))? + NAME.len();
    let line = head[at..].split(|&byte| byte == b'\r').next()?;
    std::str::from_utf8(line).ok()?.trim().parse().ok()
}

/// What the load counts while it runs.
#[derive(Debug, Default)]
pub struct Counts {
    pub completed: AtomicU64,
    pub errors: AtomicU64,
    pub stop: AtomicBool,
}

/// Closed-loop clients on keep-alive connections, on a thread of their own, until they are told to stop.
pub fn load(
    target: SocketAddr,
    conversations: Arc<Conversations>,
    clients: usize,
    core: usize,
    counts: Arc<Counts>,
) -> std::io::Result<std::thread::JoinHandle<()>> {
    std::thread::Builder::new().name("load".to_owned()).spawn(move || {
        on_core(core, || async {
            let clients = (0..clients).map(|number| {
                let (conversations, counts) = (Arc::clone(&conversations), Arc::clone(&counts));
                monoio::spawn(client(target, conversations, number as u64, counts))
            });
            for task in clients.collect::<Vec<_>>() {
                task.await;
            }
        });
    })
}

async fn client(target: SocketAddr, conversations: Arc<Conversations>, number: u64, counts: Arc<Counts>) {
    let mut random = Random::of(11, number, counts.completed.load(Ordering::Relaxed));
    let mut stream = None;
    while !counts.stop.load(Ordering::Relaxed) {
        let request = conversations.request(random.below(CONVERSATIONS), &mut random);
        let connected = match stream.take() {
            Some(stream) => Ok(stream),
            None => TcpStream::connect(target).await,
        };
        match connected {
            Ok(connected) => stream = exchange(connected, request).await,
            // A proxy that refuses must not make this a busy loop.
            Err(_) => monoio::time::sleep(std::time::Duration::from_millis(10)).await,
        }
        let counter = if stream.is_some() { &counts.completed } else { &counts.errors };
        counter.fetch_add(1, Ordering::Relaxed);
    }
}

/// One request and its answer; the connection when the answer was whole and 200.
async fn exchange(mut stream: TcpStream, request: Vec<u8>) -> Option<TcpStream> {
    let _ = stream.set_nodelay(true);
    stream.write_all(request).await.0.ok()?;
    let mut answer = Vec::new();
    let mut buffer = vec![0; 4096];
    loop {
        let (result, returned) = stream.read(buffer).await;
        buffer = returned;
        let read = result.ok().filter(|&read| read > 0)?;
        answer.extend_from_slice(&buffer[..read]);
        if let Some(head) = head_length(&answer) {
            if !answer.starts_with(b"HTTP/1.1 200") {
                return None;
            }
            if answer.len() >= head + content_length(&answer[..head])? {
                return Some(stream);
            }
        }
    }
}
