//! The generator's runtime where glommio cannot start: tokio's current-thread runtime on epoll.
//!
//! Its timers have a resolution of 1 ms, which the report's lag shows.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::time::Instant;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::LocalSet;

use crate::client::{ByteStream, Runtime};

pub(crate) struct Epoll;

impl Runtime for Epoll {
    type Stream = TcpStream;

    async fn connect(address: SocketAddr) -> io::Result<TcpStream> {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        Ok(stream)
    }

    async fn sleep_until(at: Instant) {
        if at <= Instant::now() {
            tokio::task::yield_now().await;
        } else {
            tokio::time::sleep_until(at.into()).await;
        }
    }

    fn spawn(task: impl Future<Output = ()> + 'static) {
        tokio::task::spawn_local(task);
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

/// Runs the future to its end on this thread, pinned to the core where one is given.
pub(crate) fn run<F: Future<Output = ()> + 'static>(core: Option<usize>, task: F) -> io::Result<()> {
    if let Some(id) = core
        && !core_affinity::set_for_current(core_affinity::CoreId { id })
    {
        return Err(io::Error::other(format!("this thread cannot be pinned to core {id}")));
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    LocalSet::new().block_on(&runtime, task);
    Ok(())
}
