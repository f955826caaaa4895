//! The management plane's connections: so many at once, and none that keeps the gateway waiting for long.
//!
//! They take descriptors from the same process that needs them for requests, so whoever opens connections and says
//! nothing must not hold them ([`super::places`]). With a certificate they speak TLS; the greeting is part of the first
//! read or write, so that a slow one holds up nobody else.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::serve::Listener;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{Instant, Sleep};
use tokio_rustls::server::TlsStream;
use tokio_rustls::{Accept, TlsAcceptor};

use crate::access::Access;

use super::places::{Held, Limits, Place, Places, Turn};

/// Open connections of one listener. A further one takes the place of one that keeps the gateway waiting; where there is
/// none, it waits in the kernel's queue.
pub const CONNECTIONS_MAX: usize = 128;
/// How long a connection may keep the gateway waiting.
const LIMITS: Limits =
    Limits { head: Duration::from_secs(10), body: Duration::from_secs(30), idle: Duration::from_secs(20) };

/// What a client is told whose head did not come in time.
const LATE: &str =
    "{\"code\":408,\"message\":\"Request Timeout\",\"result\":\"the head of the request did not come in time\"}";

/// A listener with these bounds.
pub(super) struct Bounded {
    listener: TcpListener,
    places: Places,
    access: Option<Access>,
}

impl Bounded {
    pub(super) fn new(listener: TcpListener, access: Option<Access>) -> Self {
        Self::with(listener, Places::new(CONNECTIONS_MAX, LIMITS), access)
    }

    fn with(listener: TcpListener, places: Places, access: Option<Access>) -> Self {
        Bounded { listener, places, access }
    }
}

impl Listener for Bounded {
    type Io = Connection;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Connection, SocketAddr) {
        let (stream, peer) = Listener::accept(&mut self.listener).await;
        let held = self.places.take(peer.ip()).await;
        let stream = match self.access.as_ref().and_then(Access::tls) {
            None => Wire::Plain(stream),
            Some(config) => Wire::Greeting(Box::new(TlsAcceptor::from(config).accept(stream))),
        };
        // It is set to a deadline before it is looked at.
        let timer = Box::pin(tokio::time::sleep_until(Instant::now()));
        (Connection { stream, held, timer, spoke: false, told: false }, peer)
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

/// What a connection speaks.
enum Wire {
    Plain(TcpStream),
    /// TLS whose handshake is not over.
    Greeting(Box<Accept<TcpStream>>),
    Secure(Box<TlsStream<TcpStream>>),
    /// The handshake failed.
    Refused,
}

impl Wire {
    /// The stream to read and write, once there is one.
    fn ready(&mut self, context: &mut Context<'_>) -> Poll<io::Result<Pin<&mut dyn Stream>>> {
        if let Wire::Greeting(greeting) = self {
            match ready!(Pin::new(greeting.as_mut()).poll(context)) {
                Ok(stream) => *self = Wire::Secure(Box::new(stream)),
                Err(error) => {
                    *self = Wire::Refused;
                    return Poll::Ready(Err(error));
                }
            }
        }
        Poll::Ready(match self {
            Wire::Plain(stream) => Ok(Pin::new(stream)),
            Wire::Secure(stream) => Ok(Pin::new(stream.as_mut())),
            Wire::Greeting(_) | Wire::Refused => Err(io::ErrorKind::ConnectionAborted.into()),
        })
    }
}

trait Stream: AsyncRead + AsyncWrite + Unpin {}
impl<T: AsyncRead + AsyncWrite + Unpin> Stream for T {}

/// A connection that ends with an error when it keeps the gateway waiting for too long, or when its place is wanted.
pub(super) struct Connection {
    stream: Wire,
    held: Held,
    timer: Pin<Box<Sleep>>,
    /// Whether anything came of the head that is waited for.
    spoke: bool,
    /// Whether its place is wanted for another.
    told: bool,
}

impl Connection {
    /// Its place in the table of connections.
    pub(super) fn place(&self) -> &Arc<Place> {
        &self.held.place
    }

    /// Does something with the stream once there is one.
    fn with<T>(
        &mut self,
        context: &mut Context<'_>,
        act: impl FnOnce(Pin<&mut dyn Stream>, &mut Context<'_>) -> Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        match self.stream.ready(context) {
            Poll::Ready(Ok(stream)) => act(stream, context),
            Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
            Poll::Pending => Poll::Pending,
        }
    }

    /// The connection's end, once its place is wanted for another.
    fn wanted(&mut self, context: &mut Context<'_>) -> Option<io::Error> {
        // What was told once is not asked for again.
        let told = self.told || Pin::new(&mut self.held.ended).poll(context).is_ready();
        self.told = told;
        told.then(|| io::ErrorKind::ConnectionAborted.into())
    }

    /// What becomes of a step that cannot be done yet: it waits, unless that takes too long or the place is wanted.
    fn wait<T>(&mut self, context: &mut Context<'_>) -> Poll<io::Result<T>> {
        if let Some(error) = self.wanted(context) {
            return Poll::Ready(Err(error));
        }
        ready!(self.out_of_time(context));
        if self.held.place.turn() == Turn::Head && self.spoke {
            self.say_late(context);
        }
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }

    fn out_of_time(&mut self, context: &mut Context<'_>) -> Poll<()> {
        let Some(deadline) = self.held.place.deadline() else { return Poll::Pending };
        if self.timer.deadline() != deadline {
            self.timer.as_mut().reset(deadline);
        }
        self.timer.as_mut().poll(context)
    }

    /// Says that the head did not come in time, as far as that can be said at once. Nothing of an answer was written in
    /// this turn.
    fn say_late(&mut self, context: &mut Context<'_>) {
        let answer = format!(
            "HTTP/1.1 408 Request Timeout\r\nContent-Type: application/json\r\nContent-Length: {}\r\nConnection: close\r\n\r\n\
             {LATE}",
            LATE.len()
        );
        let said = self.with(context, |stream, context| stream.poll_write(context, answer.as_bytes()));
        if said.is_ready() {
            let _ = self.with(context, |stream, context| stream.poll_flush(context));
        }
    }

    /// Notes what a write came to.
    fn wrote(&mut self, context: &mut Context<'_>, written: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        if written.is_ready() {
            self.held.place.took();
            self.spoke = false;
            // hyper does not read again where it knows that there is nothing to read: what ends the silence that may
            // follow has to know whom to wake.
            let _ = (self.wanted(context), self.out_of_time(context));
            return written;
        }
        self.held.place.stuck();
        self.wait(context)
    }

    /// As [`Connection::wrote`], of what moves no bytes of its own.
    fn ended(&mut self, context: &mut Context<'_>, done: Poll<io::Result<()>>) -> Poll<io::Result<()>> {
        if done.is_pending() {
            self.held.place.stuck();
            return self.wait(context);
        }
        done
    }
}

impl AsyncRead for Connection {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = buffer.filled().len();
        let read = this.with(context, |stream, context| stream.poll_read(context, buffer));
        if read.is_pending() {
            return this.wait(context);
        }
        // What follows an answer is the next head; what follows a head that was understood is its body.
        if buffer.filled().len() > before && matches!(this.held.place.turn(), Turn::Head | Turn::Idle) {
            this.held.place.now(Turn::Head);
            this.spoke = true;
        }
        read
    }
}

impl AsyncWrite for Connection {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        // One that was not waited with when it was told: what is read ahead keeps hyper from reading on.
        if let Some(error) = this.wanted(context) {
            return Poll::Ready(Err(error));
        }
        let written = this.with(context, |stream, context| stream.poll_write(context, bytes));
        this.wrote(context, written)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        if let Some(error) = this.wanted(context) {
            return Poll::Ready(Err(error));
        }
        let written = this.with(context, |stream, context| stream.poll_write_vectored(context, slices));
        this.wrote(context, written)
    }

    fn is_write_vectored(&self) -> bool {
        matches!(self.stream, Wire::Plain(_))
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let done = this.with(context, |stream, context| stream.poll_flush(context));
        this.ended(context, done)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let done = this.with(context, |stream, context| stream.poll_shutdown(context));
        this.ended(context, done)
    }
}

#[cfg(test)]
mod tests {
    use axum::Router;
    use axum::body::Bytes;
    use axum::routing::{get, post};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::super::ask::Whole;
    use super::super::guard::{Peer, heard};
    use super::*;

    /// Longest wait for anything here.
    const PATIENCE: Duration = Duration::from_secs(20);
    const SHORT: Duration = Duration::from_millis(50);
    /// Limits that nobody here runs into.
    const PATIENT: Limits = Limits { head: PATIENCE, body: PATIENCE, idle: PATIENCE };
    /// More than the kernel's buffers of a connection take, bytes.
    const LARGE: usize = 64 << 20;

    async fn start(connections_max: usize, limits: Limits) -> SocketAddr {
        started(Places::new(connections_max, limits)).await
    }

    async fn started(places: Places) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("bound");
        let router = Router::new()
            .route("/", get(async || "here"))
            .route("/later", get(async || tokio::time::sleep(SHORT / 10).await))
            .route("/body", post(async |Whole(body): Whole| body))
            .route("/large", get(async || Bytes::from(vec![b'.'; LARGE])))
            .layer(axum::middleware::from_fn(heard));
        let bounded = Bounded::with(listener, places, None);
        tokio::spawn(async move { axum::serve(bounded, router.into_make_service_with_connect_info::<Peer>()).await });
        address
    }

    async fn connect(address: SocketAddr, said: &str) -> TcpStream {
        let mut stream = TcpStream::connect(address).await.expect("connected");
        stream.write_all(said.as_bytes()).await.expect("written");
        stream
    }

    /// All that comes until the end; whether that is a FIN or a reset, it is an end.
    async fn rest(mut stream: TcpStream) -> String {
        let mut rest = Vec::new();
        let _ = stream.read_to_end(&mut rest).await;
        String::from_utf8_lossy(&rest).into_owned()
    }

    const ASK_ONCE: &str = "GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n";
    const HALF_HEAD: &str = "GET / HTTP/1.1\r\nHost:";
    const HALF_BODY: &str = "POST /body HTTP/1.1\r\nHost: h\r\nContent-Length: 9\r\n\r\nhalf";

    fn block_on(future: impl Future<Output = ()>) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(async { tokio::time::timeout(PATIENCE, future).await.expect("in time") });
    }

    #[test]
    fn a_head_or_a_body_that_does_not_come_is_answered_408_and_silence_not_at_all() {
        block_on(async {
            let address = start(8, Limits { head: SHORT, body: SHORT, idle: SHORT }).await;
            for (said, begins) in [("", ""), (HALF_HEAD, "HTTP/1.1 408 "), (HALF_BODY, "HTTP/1.1 408 ")] {
                let answer = rest(connect(address, said).await).await;
                assert!(answer.starts_with(begins) && answer.is_empty() == begins.is_empty(), "{said:?}: {answer}");
                if let Some((head, body)) = answer.split_once("\r\n\r\n") {
                    let length = format!("content-length: {}", body.len());
                    let head = head.to_lowercase();
                    assert!(head.contains("connection: close") && head.contains(&length), "{head}");
                    assert!(body.contains("\"code\":408") && body.contains("in time"), "{body}");
                }
            }
            for path in ["/", "/later"] {
                let kept = connect(address, &format!("GET {path} HTTP/1.1\r\nHost: h\r\n\r\n")).await;
                assert!(rest(kept).await.starts_with("HTTP/1.1 200 OK"), "one that says nothing more is ended");
            }
        });
    }

    #[test]
    fn a_head_that_comes_byte_by_byte_does_not_gain_time() {
        block_on(async {
            let address = start(8, Limits { head: SHORT, ..PATIENT }).await;
            let mut stream = connect(address, HALF_HEAD).await;
            while stream.write_all(b"a").await.is_ok() {
                tokio::time::sleep(SHORT / 10).await;
            }
        });
    }

    #[test]
    fn an_answer_that_nobody_takes_ends() {
        block_on(async {
            let places = Places::new(8, Limits { idle: SHORT, ..PATIENT });
            let address = started(places.clone()).await;
            let stream = connect(address, "GET /large HTTP/1.1\r\nHost: h\r\n\r\n").await;
            for taken in [1, 0] {
                while places.count() != taken {
                    tokio::time::sleep(SHORT / 50).await;
                }
            }
            assert!(rest(stream).await.len() < LARGE, "it was ended before its last byte");
        });
    }

    #[test]
    fn those_who_keep_the_gateway_waiting_make_room() {
        block_on(async {
            let address = start(4, PATIENT).await;
            let mut waiting = Vec::new();
            let (large, later) = ("GET /large HTTP/1.1\r\nHost: h\r\n\r\n", "GET /later HTTP/1.1\r\nHost: h\r\n\r\n");
            for said in ["", HALF_HEAD, HALF_BODY, large, later].repeat(4) {
                waiting.push(connect(address, said).await);
            }
            assert!(rest(connect(address, ASK_ONCE).await).await.ends_with("here"));
            let ended = waiting.remove(0);
            assert_eq!(rest(ended).await, "", "the oldest had to go");
        });
    }
}
