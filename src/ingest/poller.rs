//! Waiting for many descriptors, a wake from another thread and a timer, with one epoll.
//!
//! Descriptors are watched level-triggered. A ZMQ descriptor only says that something may have happened: after it
//! is ready, its socket must be read until it would block, or be visited again by the caller's own list.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

const WAKE: u64 = u64::MAX;
const TICK: u64 = u64::MAX - 1;
/// Descriptors reported by one wait; what is ready beyond it comes with the next.
const READY_MAX: usize = 256;

/// Wakes a [`Poller`] from any thread.
#[derive(Clone, Debug)]
pub(crate) struct Waker(Arc<File>);

impl Waker {
    pub(crate) fn wake(&self) {
        // The one error possible is a full counter, and then the wake is pending anyway.
        let _ = (&*self.0).write(&1_u64.to_ne_bytes());
    }
}

/// One epoll, with an event counter and a timer of its own.
#[derive(Debug)]
pub(crate) struct Poller {
    epoll: OwnedFd,
    wake: Arc<File>,
    timer: File,
    period: Option<Duration>,
}

fn owned(fd: libc::c_int) -> io::Result<OwnedFd> {
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call that returned `fd` made it for us alone, and it is not closed elsewhere.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

impl Poller {
    pub(crate) fn new() -> io::Result<Self> {
        // SAFETY: the three calls take plain numbers and touch no memory of ours.
        let (epoll, wake, timer) = unsafe {
            (
                owned(libc::epoll_create1(libc::EPOLL_CLOEXEC))?,
                owned(libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK))?,
                owned(libc::timerfd_create(libc::CLOCK_MONOTONIC, libc::TFD_CLOEXEC | libc::TFD_NONBLOCK))?,
            )
        };
        let poller = Poller { epoll, wake: Arc::new(File::from(wake)), timer: File::from(timer), period: None };
        poller.watch(poller.wake.as_raw_fd(), WAKE)?;
        poller.watch(poller.timer.as_raw_fd(), TICK)?;
        Ok(poller)
    }

    pub(crate) fn waker(&self) -> Waker {
        Waker(Arc::clone(&self.wake))
    }

    /// Reports `token` whenever the descriptor is readable, until [`Poller::forget`].
    pub(crate) fn watch(&self, fd: RawFd, token: u64) -> io::Result<()> {
        let mut event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: token };
        // SAFETY: `event` lives through the call, which only reads it.
        match unsafe { libc::epoll_ctl(self.epoll.as_raw_fd(), libc::EPOLL_CTL_ADD, fd, &raw mut event) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Ends a watch; must be called before the descriptor is closed.
    pub(crate) fn forget(&self, fd: RawFd) {
        // SAFETY: a null event is allowed for EPOLL_CTL_DEL since Linux 2.6.9.
        unsafe { libc::epoll_ctl(self.epoll.as_raw_fd(), libc::EPOLL_CTL_DEL, fd, std::ptr::null_mut()) };
    }

    /// Returns from [`Poller::wait`] this often; none = only for descriptors and wakes.
    pub(crate) fn tick_every(&mut self, period: Option<Duration>) {
        if self.period == period {
            return;
        }
        self.period = period;
        let span = period.unwrap_or_default();
        let span = libc::timespec {
            tv_sec: span.as_secs() as libc::time_t,
            tv_nsec: libc::c_long::from(span.subsec_nanos() as i32),
        };
        let spec = libc::itimerspec { it_interval: span, it_value: span };
        // SAFETY: `spec` lives through the call, which only reads it; a null old value is allowed.
        unsafe { libc::timerfd_settime(self.timer.as_raw_fd(), 0, &raw const spec, std::ptr::null_mut()) };
    }

    /// Waits until something is ready and appends its tokens; does not wait when `at_once`.
    pub(crate) fn wait(&self, at_once: bool, tokens: &mut Vec<u64>) {
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; READY_MAX];
        let timeout = if at_once { 0 } else { -1 };
        // SAFETY: the kernel writes at most READY_MAX entries of `events`, which lives through the call.
        let n =
            unsafe { libc::epoll_wait(self.epoll.as_raw_fd(), events.as_mut_ptr(), READY_MAX as libc::c_int, timeout) };
        // An interrupted wait is an empty one.
        for event in &events[..usize::try_from(n).unwrap_or(0)] {
            match event.u64 {
                WAKE => _ = (&*self.wake).read(&mut [0; 8]),
                TICK => _ = (&self.timer).read(&mut [0; 8]),
                token => tokens.push(token),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wake_a_tick_and_a_descriptor_end_a_wait() {
        let mut poller = Poller::new().unwrap();
        let mut tokens = Vec::new();
        poller.waker().wake();
        poller.wait(false, &mut tokens);
        poller.tick_every(Some(Duration::from_micros(200)));
        poller.wait(false, &mut tokens);
        poller.wait(false, &mut tokens);
        poller.tick_every(None);
        poller.wait(true, &mut tokens);
        assert!(tokens.is_empty());

        let (reader, mut writer) = io::pipe().unwrap();
        poller.watch(reader.as_raw_fd(), 7).unwrap();
        writer.write_all(b"x").unwrap();
        poller.wait(false, &mut tokens);
        assert_eq!(tokens, [7]);
        poller.forget(reader.as_raw_fd());
        poller.wait(true, &mut tokens);
        assert_eq!(tokens, [7]);
    }
}
