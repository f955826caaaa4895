//! The next read of a connection, kept in flight for the connection's whole life.
//!
//! **Invariant.** A read that was begun is always awaited: its bytes end up in the buffer or in the kernel, never
//! nowhere. While a read is in flight the buffer belongs to it, and [`ReadAhead::bytes`] is empty.
//!
//! ```text
//!            begin                    completes
//!   Resting ───────▶ InFlight ─────────────────────▶ Resting (bytes appended)
//!                       │   ╲ cancel: completes with bytes, or with nothing
//!                       └────────────────────────▶ Ended (end of file or error)
//! ```

use std::cell::{Cell, RefCell};
use std::future::{Future, poll_fn};
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use monoio::buf::{IoBufMut, SliceMut};
use monoio::io::{CancelableAsyncReadRent, Canceller};

use super::carry::READ_BYTES_MAX;

/// How the reading side of a connection ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The peer closed its side.
    Closed,
    /// The connection broke.
    Failed(io::ErrorKind),
}

/// Least room offered to a read, bytes.
const ROOM_MIN: usize = 1024;
/// Room of a fresh buffer, bytes; what an idle connection holds.
const ROOM_FRESH: usize = 4 * 1024;

struct Shared {
    wanted: Cell<bool>,
    /// Bytes that were in the buffer when the read in flight began.
    taken_along: Cell<usize>,
    buffer: Cell<Vec<u8>>,
    result: Cell<Option<io::Result<usize>>>,
    canceller: RefCell<Canceller>,
}

/// Reads a connection ahead of need.
pub struct ReadAhead {
    /// Never ends; polled by the connection's own task only.
    pump: Pin<Box<dyn Future<Output = ()>>>,
    shared: Rc<Shared>,
    end: Option<End>,
    /// Bytes kept without anyone asking for them; beyond it [`ReadAhead::poll_watch`] no longer reads.
    ahead_max: usize,
}

impl ReadAhead {
    /// Begins with nothing read. `ahead_max` bounds the bytes that are kept while only the end is watched for.
    pub fn new<R>(reader: R, ahead_max: usize) -> Self
    where
        R: CancelableAsyncReadRent + 'static,
    {
        let shared = Rc::new(Shared {
            wanted: Cell::new(false),
            taken_along: Cell::new(0),
            buffer: Cell::default(),
            result: Cell::default(),
            canceller: RefCell::default(),
        });
        ReadAhead { pump: Box::pin(pump(reader, Rc::clone(&shared))), shared, end: None, ahead_max }
    }

    /// Whether a read is in flight, and with it the buffer.
    #[must_use]
    pub fn in_flight(&self) -> bool {
        self.shared.wanted.get()
    }

    /// Bytes that came before the read in flight and are with it: only [`ReadAhead::cancel`] gets at them now.
    #[must_use]
    pub fn taken_along(&self) -> usize {
        if self.in_flight() { self.shared.taken_along.get() } else { 0 }
    }

    /// The bytes read and not yet taken. Empty while a read is in flight.
    pub fn bytes(&mut self) -> Vec<u8> {
        self.shared.buffer.take()
    }

    /// Gives bytes back, or a fresh buffer to read into. No read may be in flight.
    pub fn put_back(&mut self, bytes: Vec<u8>) {
        debug_assert!(!self.in_flight(), "the buffer belongs to the read");
        self.shared.buffer.set(bytes);
    }

    /// Waits for more bytes: begins a read or goes on with the one in flight.
    ///
    /// # Errors
    /// How the connection ended; the same again when asked again.
    pub fn poll_fill(&mut self, context: &mut Context<'_>) -> Poll<Result<usize, End>> {
        if let Some(end) = self.end {
            return Poll::Ready(Err(end));
        }
        self.shared.wanted.set(true);
        let _never_ends = self.pump.as_mut().poll(context);
        match self.shared.result.take() {
            None => Poll::Pending,
            Some(result) => Poll::Ready(self.settle(result)),
        }
    }

    /// Watches for the end of the connection while something else is waited for. Bytes that come are kept.
    pub fn poll_watch(&mut self, context: &mut Context<'_>) -> Poll<End> {
        loop {
            if let Some(end) = self.end {
                return Poll::Ready(end);
            }
            if !self.in_flight() && self.held() >= self.ahead_max {
                return Poll::Pending;
            }
            match self.poll_fill(context) {
                Poll::Ready(_) => {}
                Poll::Pending => return Poll::Pending,
            }
        }
    }

    /// Takes a read in flight back: afterwards none is, and what had come meanwhile is in the buffer.
    ///
    /// # Errors
    /// How the connection ended, if the read found that out.
    pub async fn cancel(&mut self) -> Result<usize, End> {
        if !self.in_flight() {
            return self.end.map_or(Ok(0), Err);
        }
        let canceller = self.shared.canceller.take();
        self.shared.canceller.replace(canceller.cancel());
        let result = poll_fn(|context| {
            let _never_ends = self.pump.as_mut().poll(context);
            self.shared.result.take().map_or(Poll::Pending, Poll::Ready)
        })
        .await;
        match result {
            Err(error) if error.raw_os_error() == Some(libc::ECANCELED) => {
                self.shared.wanted.set(false);
                Ok(0)
            }
            result => self.settle(result),
        }
    }

    fn settle(&mut self, result: io::Result<usize>) -> Result<usize, End> {
        self.shared.wanted.set(false);
        match result {
            Ok(0) => self.finish(End::Closed),
            Ok(count) => Ok(count),
            Err(error) => self.finish(End::Failed(error.kind())),
        }
    }

    fn finish(&mut self, end: End) -> Result<usize, End> {
        self.end = Some(end);
        Err(end)
    }

    /// How the connection ended, once that is known.
    #[must_use]
    pub fn end(&self) -> Option<End> {
        self.end
    }

    /// Bytes read and not yet taken; 0 while a read is in flight.
    #[must_use]
    pub fn held(&self) -> usize {
        let buffer = self.shared.buffer.take();
        let held = buffer.len();
        self.shared.buffer.set(buffer);
        held
    }
}

async fn pump<R: CancelableAsyncReadRent>(mut reader: R, shared: Rc<Shared>) {
    loop {
        // Nobody needs to wake this: it is polled right after the wish is set.
        poll_fn(|_| if shared.wanted.get() && !shared.has_result() { Poll::Ready(()) } else { Poll::Pending }).await;
        let mut buffer = shared.buffer.take();
        let held = buffer.len();
        shared.taken_along.set(held);
        if buffer.capacity() - held < ROOM_MIN {
            // Doubling keeps the copying of a long body linear; a body of known length has reserved already.
            buffer.reserve(ROOM_FRESH.max(held));
        }
        let room = buffer.capacity().min(held + READ_BYTES_MAX);
        let handle = shared.canceller.borrow().handle();
        let (result, slice) = reader.cancelable_read(buffer.slice_mut(held..room), handle).await;
        shared.buffer.set(SliceMut::into_inner(slice));
        shared.result.set(Some(result));
    }
}

impl Shared {
    fn has_result(&self) -> bool {
        let result = self.result.take();
        let has = result.is_some();
        self.result.set(result);
        has
    }
}
