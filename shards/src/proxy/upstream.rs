//! Connections to endpoints: kept alive per address, checked before they are used again.

use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::rc::Rc;
use std::time::Duration;

use monoio::buf::{IoBuf, IoBufMut};
use monoio::io::{AsyncReadRent, AsyncWriteRent};
use monoio::net::TcpStream;

use crate::executor::carry::{SHORT_BYTES_MAX, carry};
use crate::executor::visit_ns;

/// One connection to an endpoint.
#[derive(Debug)]
pub struct Upstream {
    stream: TcpStream,
    idle_since_ns: u64,
    /// It has served a request before.
    pub reused: bool,
}

/// Idle connections to one address.
#[derive(Debug)]
pub struct Pool {
    address: SocketAddr,
    /// Oldest first.
    idle: RefCell<VecDeque<Upstream>>,
}

/// The pools of a shard, by address: two services with the same endpoint share one.
#[derive(Debug, Default)]
pub struct Pools(RefCell<HashMap<SocketAddr, Rc<Pool>>>);

impl Pools {
    /// The pool of an address.
    #[must_use]
    pub fn of(&self, address: SocketAddr) -> Rc<Pool> {
        let mut pools = self.0.borrow_mut();
        let pool = pools.entry(address).or_insert_with(|| Rc::new(Pool { address, idle: RefCell::default() }));
        Rc::clone(pool)
    }

    /// Closes what has been idle for too long, and forgets pools that nobody holds.
    pub fn sweep(&self, idle_max: Duration) {
        self.0.borrow_mut().retain(|_, pool| {
            pool.close_older_than(idle_max);
            Rc::strong_count(pool) > 1 || !pool.idle.borrow().is_empty()
        });
    }
}

impl Pool {
    /// An idle connection that is still good, if there is one.
    #[must_use]
    pub fn take(&self, idle_max: Duration) -> Option<Upstream> {
        let mut idle = self.idle.borrow_mut();
        while let Some(mut upstream) = idle.pop_back() {
            if is_older(&upstream, idle_max) {
                // The rest is older still.
                idle.clear();
                return None;
            }
            if is_quiet(&upstream.stream) {
                upstream.reused = true;
                return Some(upstream);
            }
        }
        None
    }

    /// Keeps a connection whose last answer is complete, unless `connections_max` are idle: then it is closed.
    pub fn put(&self, mut upstream: Upstream, connections_max: usize) {
        let mut idle = self.idle.borrow_mut();
        if idle.len() < connections_max {
            upstream.idle_since_ns = visit_ns();
            idle.push_back(upstream);
        }
    }

    /// Closes all idle connections: the endpoint has shown that it is gone.
    pub fn clear(&self) {
        self.idle.borrow_mut().clear();
    }

    /// Opens a connection.
    ///
    /// # Errors
    /// What the kernel said.
    pub async fn connect(&self) -> io::Result<Upstream> {
        let stream = TcpStream::connect_addr(self.address).await?;
        // Requests are written in one piece; without this the last part of a long one would wait for an answer.
        stream.set_nodelay(true)?;
        Ok(Upstream { stream, idle_since_ns: 0, reused: false })
    }

    fn close_older_than(&self, idle_max: Duration) {
        let mut idle = self.idle.borrow_mut();
        while idle.front().is_some_and(|upstream| is_older(upstream, idle_max)) {
            idle.pop_front();
        }
    }
}

impl Upstream {
    /// Writes `bytes[from..]`; gives the buffer back.
    pub async fn write(&mut self, bytes: Vec<u8>, from: usize) -> (io::Result<()>, Vec<u8>) {
        write_all(&mut self.stream, bytes, from).await
    }

    /// Reads into the room behind the buffer's bytes; 0 is the end of the connection.
    pub async fn read(&mut self, buffer: Vec<u8>) -> (io::Result<usize>, Vec<u8>) {
        let (from, to) = (buffer.len(), buffer.capacity());
        let (result, slice) = self.stream.read(buffer.slice_mut(from..to)).await;
        (result, slice.into_inner())
    }
}

/// Bytes of one write: less than a tenth of a millisecond.
const WRITE_BYTES_MAX: usize = 128 * 1024;

/// Writes `bytes[from..]`; gives the buffer back.
pub async fn write_all<W: AsyncWriteRent>(
    writer: &mut W,
    mut bytes: Vec<u8>,
    mut from: usize,
) -> (io::Result<()>, Vec<u8>) {
    while from < bytes.len() {
        // The kernel delivers a write on loopback in the same breath: on epoll here and now, on a ring in the next visit.
        let end = bytes.len().min(from + WRITE_BYTES_MAX);
        if end - from > SHORT_BYTES_MAX {
            carry(end - from).await;
        }
        let (result, slice) = writer.write(bytes.slice(from..end)).await;
        bytes = slice.into_inner();
        match result {
            Ok(0) => return (Err(io::ErrorKind::WriteZero.into()), bytes),
            Ok(count) => from += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return (Err(error), bytes),
        }
    }
    (Ok(()), bytes)
}

fn is_older(upstream: &Upstream, idle_max: Duration) -> bool {
    visit_ns().saturating_sub(upstream.idle_since_ns) > idle_max.as_nanos() as u64
}

/// Whether nothing has come on an idle connection: neither its end nor bytes that nobody asked for.
fn is_quiet(stream: &TcpStream) -> bool {
    let mut byte = 0_u8;
    // SAFETY: the descriptor is open as long as `stream` lives, and the kernel writes at most the one byte given.
    let result =
        unsafe { libc::recv(stream.as_raw_fd(), (&raw mut byte).cast(), 1, libc::MSG_PEEK | libc::MSG_DONTWAIT) };
    result < 0 && io::Error::last_os_error().kind() == io::ErrorKind::WouldBlock
}
