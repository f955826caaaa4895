//! The driver of a shard: the best ring the kernel gives, else epoll, with the reason for every step down.

use std::future::Future;
use std::io;

use io_uring::{IoUring, Probe, opcode};
use monoio::time::TimeDriver;
use monoio::{FusionRuntime, IoUringDriver, LegacyDriver, RuntimeBuilder};

/// Drivers, best first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Rung {
    /// io_uring, single issuer, deferred and cooperative task work (Linux 6.1).
    DeferTaskrun,
    /// io_uring, cooperative task work (Linux 5.19).
    CoopTaskrun,
    /// io_uring without flags.
    Plain,
    /// epoll: no io_uring at all.
    Epoll,
}

impl Rung {
    /// Every rung, best first.
    pub const LADDER: [Rung; 4] = [Rung::DeferTaskrun, Rung::CoopTaskrun, Rung::Plain, Rung::Epoll];

    /// The name in logs and status.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Rung::DeferTaskrun => "io_uring defer-taskrun",
            Rung::CoopTaskrun => "io_uring coop-taskrun",
            Rung::Plain => "io_uring plain",
            Rung::Epoll => "epoll",
        }
    }

    fn builder(self) -> Option<io_uring::Builder> {
        let mut builder = IoUring::builder();
        match self {
            Rung::DeferTaskrun => {
                builder.setup_single_issuer().setup_coop_taskrun().setup_defer_taskrun();
            }
            Rung::CoopTaskrun => {
                builder.setup_coop_taskrun();
            }
            Rung::Plain => {}
            Rung::Epoll => return None,
        }
        Some(builder)
    }
}

/// A rung that could not be had.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The rung.
    pub rung: Rung,
    /// What the kernel said, or what it lacks.
    pub reason: String,
}

/// A runtime of the calling thread; it must be run on the thread that built it.
pub struct Ring(FusionRuntime<TimeDriver<IoUringDriver>, TimeDriver<LegacyDriver>>);

impl Ring {
    /// Builds the best driver from `first` down, and says which one and why not a better one.
    ///
    /// # Errors
    /// The refusals of every rung: not even epoll could be had.
    pub fn build(first: Rung, entries: u32) -> Result<(Ring, Rung, Vec<Refusal>), Vec<Refusal>> {
        let mut refusals = Vec::new();
        for rung in Rung::LADDER.into_iter().filter(|rung| *rung >= first) {
            match Self::build_one(rung, entries) {
                Ok(ring) => return Ok((ring, rung, refusals)),
                Err(error) => refusals.push(Refusal { rung, reason: error.to_string() }),
            }
        }
        Err(refusals)
    }

    fn build_one(rung: Rung, entries: u32) -> io::Result<Ring> {
        let runtime = match rung.builder() {
            Some(builder) => {
                try_out(&builder)?;
                let ring = RuntimeBuilder::<IoUringDriver>::new().uring_builder(builder).with_entries(entries);
                ring.enable_timer().build()?.into()
            }
            None => RuntimeBuilder::<LegacyDriver>::new().with_entries(entries).enable_timer().build()?.into(),
        };
        Ok(Ring(runtime))
    }

    pub(super) fn block_on<F: Future>(&mut self, main: F) -> F::Output {
        self.0.block_on(main)
    }
}

/// Makes a small ring with the same flags and sends one operation through it: set-up alone proves little, because a
/// filter may refuse `io_uring_enter`, and monoio would then spin in silence.
fn try_out(builder: &io_uring::Builder) -> io::Result<()> {
    const NEEDED: [(u8, &str); 9] = [
        (opcode::Accept::CODE, "accept"),
        (opcode::AsyncCancel::CODE, "async cancel"),
        (opcode::Close::CODE, "close"),
        (opcode::Connect::CODE, "connect"),
        (opcode::PollAdd::CODE, "poll"),
        (opcode::Read::CODE, "read"),
        (opcode::Recv::CODE, "recv"),
        (opcode::Send::CODE, "send"),
        (opcode::Timeout::CODE, "timeout"),
    ];
    let mut ring: IoUring = builder.build(8)?;
    let mut probe = Probe::new();
    ring.submitter().register_probe(&mut probe)?;
    if let Some((_, name)) = NEEDED.iter().find(|(code, _)| !probe.is_supported(*code)) {
        return Err(io::Error::new(io::ErrorKind::Unsupported, format!("the kernel's io_uring has no {name}")));
    }
    let nop = opcode::Nop::new().build().user_data(1);
    // SAFETY: a no-op refers to no memory.
    unsafe { ring.submission().push(&nop) }.map_err(|full| io::Error::other(full.to_string()))?;
    ring.submit_and_wait(1)?;
    match ring.completion().next() {
        Some(_) => Ok(()),
        None => Err(io::Error::other("the ring took an operation and gave no completion")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ladder_goes_from_best_to_epoll_and_begins_where_asked() {
        for first in Rung::LADDER {
            let (_ring, rung, refusals) = Ring::build(first, 256).expect("epoll is always there");
            assert!(rung >= first);
            assert!(refusals.iter().all(|refusal| refusal.rung >= first && refusal.rung < rung));
        }
    }
}
