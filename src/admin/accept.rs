//! The management plane's connections: so many at once, and none that is silent for long.
//!
//! They take descriptors from the same process that needs them for requests, so whoever opens connections and says
//! nothing must not hold them. With a certificate they speak TLS; the greeting is part of the first read or write, so
//! that a slow one holds up nobody else.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::serve::Listener;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, Sleep};
use tokio_rustls::server::TlsStream;
use tokio_rustls::{Accept, TlsAcceptor};

use crate::access::Access;

/// Open connections of one listener. Beyond it new ones wait in the kernel's queue until one is closed.
pub const CONNECTIONS_MAX: usize = 128;
/// Longest time in which nothing is read from a connection or written to it. Then it is closed. No handler takes
/// as long before it answers.
const IDLE_TIMEOUT: Duration = Duration::from_secs(20);

/// A listener with these bounds.
pub(super) struct Bounded {
    listener: TcpListener,
    room: Arc<Semaphore>,
    idle_timeout: Duration,
    access: Option<Access>,
}

impl Bounded {
    pub(super) fn new(listener: TcpListener, access: Option<Access>) -> Self {
        Self::with(listener, CONNECTIONS_MAX, IDLE_TIMEOUT, access)
    }

    fn with(listener: TcpListener, connections_max: usize, idle_timeout: Duration, access: Option<Access>) -> Self {
        Bounded { listener, room: Arc::new(Semaphore::new(connections_max)), idle_timeout, access }
    }
}

impl Listener for Bounded {
    type Io = Connection;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Connection, SocketAddr) {
        // The semaphore is never closed; were it, connections would only go uncounted.
        let room = Arc::clone(&self.room).acquire_owned().await.ok();
        let (stream, peer) = Listener::accept(&mut self.listener).await;
        let idle = Box::pin(tokio::time::sleep(self.idle_timeout));
        let stream = match self.access.as_ref().and_then(Access::tls) {
            None => Wire::Plain(stream),
            Some(config) => Wire::Greeting(Box::new(TlsAcceptor::from(config).accept(stream))),
        };
        (Connection { stream, idle, idle_timeout: self.idle_timeout, _room: room }, peer)
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

/// A connection that ends with an error when nothing moves on it for long.
pub(super) struct Connection {
    stream: Wire,
    idle: Pin<Box<Sleep>>,
    idle_timeout: Duration,
    _room: Option<OwnedSemaphorePermit>,
}

impl Connection {
    /// Passes on what a read or a write came to: progress begins the time anew, and none in time is an error.
    fn watch<T>(&mut self, context: &mut Context<'_>, result: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if result.is_ready() {
            let until = Instant::now() + self.idle_timeout;
            self.idle.as_mut().reset(until);
            return result;
        }
        ready!(self.idle.as_mut().poll(context));
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
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
}

impl AsyncRead for Connection {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let result = this.with(context, |stream, context| stream.poll_read(context, buffer));
        this.watch(context, result)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let result = this.with(context, |stream, context| stream.poll_write(context, bytes));
        this.watch(context, result)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let result = this.with(context, |stream, context| stream.poll_write_vectored(context, slices));
        this.watch(context, result)
    }

    fn is_write_vectored(&self) -> bool {
        matches!(self.stream, Wire::Plain(_))
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.with(context, |stream, context| stream.poll_flush(context))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.with(context, |stream, context| stream.poll_shutdown(context))
    }
}

#[cfg(test)]
mod tests {
    use axum::Router;
    use axum::routing::get;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    /// Longest wait for anything here.
    const PATIENCE: Duration = Duration::from_secs(20);

    async fn start(connections_max: usize, idle_timeout: Duration) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("bound");
        let router = Router::new().route("/", get(|| async { "here" }));
        let bounded = Bounded::with(listener, connections_max, idle_timeout, None);
        tokio::spawn(async move { axum::serve(bounded, router).await });
        address
    }

    async fn ask(address: SocketAddr) -> io::Result<String> {
        let mut stream = TcpStream::connect(address).await?;
        stream.write_all(b"GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n").await?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await?;
        Ok(answer)
    }

    fn block_on(future: impl Future<Output = ()>) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(async { tokio::time::timeout(PATIENCE, future).await.expect("in time") });
    }

    #[test]
    fn silent_connections_and_half_heads_make_room_after_the_idle_time() {
        block_on(async {
            let address = start(2, Duration::from_millis(50)).await;
            let mut silent = TcpStream::connect(address).await.expect("connected");
            let mut half = TcpStream::connect(address).await.expect("connected");
            half.write_all(b"GET / HTTP/1.1\r\nHost:").await.expect("written");
            assert!(ask(address).await.expect("an answer").ends_with("here"));
            for stream in [&mut silent, &mut half] {
                // Whether the end is a FIN or a reset, it is an end.
                let mut rest = Vec::new();
                let _ = stream.read_to_end(&mut rest).await;
            }
        });
    }

    #[test]
    fn a_connection_beyond_the_bound_waits_until_another_ends() {
        block_on(async {
            let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
            let address = listener.local_addr().expect("bound");
            let mut bounded = Bounded::with(listener, 1, PATIENCE, None);
            let _clients = [TcpStream::connect(address).await, TcpStream::connect(address).await];
            let (first, _) = Listener::accept(&mut bounded).await;
            let early = tokio::time::timeout(Duration::from_millis(50), Listener::accept(&mut bounded)).await;
            assert!(early.is_err(), "there is no room");
            drop(first);
            Listener::accept(&mut bounded).await;
        });
    }
}
