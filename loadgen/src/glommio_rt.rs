//! The generator's usual runtime: glommio on io_uring, a runtime that the gateway does not use.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use futures_lite::{AsyncReadExt, AsyncWriteExt};
use glommio::net::TcpStream;
use glommio::timer::sleep;
use glommio::{LocalExecutorBuilder, Placement};

use crate::client::{ByteStream, Runtime};

/// Shortest timer: a task that is late gives way with it. A task that wakes itself would keep the run queue from
/// getting empty, and completions are reaped only between two passes over it.
const GIVE_WAY: Duration = Duration::from_micros(1);

/// Memory registered for storage I/O, which this program does none of: the least that glommio takes.
const IO_MEMORY_BYTES: usize = 64 * 1024;

pub(crate) struct Glommio;

/// glommio's error as one that other threads may see.
fn io_error(error: glommio::GlommioError<()>) -> io::Error {
    io::Error::other(error.to_string())
}

impl Runtime for Glommio {
    type Stream = TcpStream;

    async fn connect(address: SocketAddr) -> io::Result<TcpStream> {
        let stream = TcpStream::connect(address).await.map_err(io_error)?;
        stream.set_nodelay(true).map_err(io_error)?;
        Ok(stream)
    }

    async fn sleep_until(at: Instant) {
        sleep(at.saturating_duration_since(Instant::now()).max(GIVE_WAY)).await;
    }

    fn spawn(task: impl Future<Output = ()> + 'static) {
        glommio::spawn_local(task).detach();
    }
}

impl ByteStream for TcpStream {
    async fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        AsyncReadExt::read(self, into).await
    }

    async fn write_all(&mut self, bytes: &[u8]) -> io::Result<()> {
        AsyncWriteExt::write_all(self, bytes).await
    }
}

/// Whether glommio starts here; the reason if not (no io_uring, too little lockable memory).
pub(crate) fn probe() -> Result<(), String> {
    // On a thread of its own: what a failed start leaves in thread-locals dies with it.
    let attempt = std::thread::spawn(|| {
        let made = LocalExecutorBuilder::new(Placement::Unbound).io_memory(IO_MEMORY_BYTES).make();
        made.map(|_| ()).map_err(|error| error.to_string())
    });
    attempt.join().unwrap_or_else(|_| Err("its start-up panicked".to_owned()))
}

/// Runs the future to its end on this thread, pinned to the core where one is given.
pub(crate) fn run<F: Future<Output = ()> + 'static>(core: Option<usize>, task: F) -> io::Result<()> {
    let placement = core.map_or(Placement::Unbound, Placement::Fixed);
    let executor = LocalExecutorBuilder::new(placement).io_memory(IO_MEMORY_BYTES).make().map_err(io_error)?;
    executor.run(task);
    Ok(())
}
