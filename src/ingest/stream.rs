//! One (endpoint, rank) stream: what its connection, its sequence numbers and its replays mean for the blocks held.
//!
//! No I/O and no clock: what happened goes in, what is to be done comes out through the `act` callback, in order.
//!
//! ```text
//!                 connected, nothing known, no replay address
//!        ┌──────┐────────────────────────────────────────────────►┌──────┐◄─────────────────────────┐
//!   ●───►│ Down │   connected, replay address: Replay{0 | last}   │ Live │ first batch: continues   │
//!        │      │──────────────►┌───────────┐  end: feed held     │      │ (keep) or not (Clear)    │
//!        │      │               │ Replaying │────────────────────►│      │                          │
//!        │      │               │           │  failed, was live   │      │                    ┌─────┴────┐
//!        │      │               │           │────────────────────►│      │                    │ Unproven │
//!        │      │               │           │◄────────────────────│      │                    │          │
//!        │      │               └───────────┘  gap or restart     └──────┘                    │          │
//!        │      │                     └──────── failed, was down ────────────────────────────►│          │
//!        │      │──── connected, something known, no replay address ─────────────────────────►│          │
//!        └──────┘                                                                             └──────────┘
//!            ▲ lost, from anywhere: what is held stays, but counts no more; a while later it is given up
//! ```
//!
//! **Proof.** A replay starts at the last batch applied, not behind it: if the engine sends that very batch, it is
//! the same process and the history goes on; if it sends another one under that number, or none, the engine was
//! restarted, the rank is cleared and its history is asked for from 0.
//!
//! **Leftovers.** Batches of a process that is gone may be read after its successor has connected, under numbers that
//! fit. Where there is a replay address, a batch whose clock stands before that of the last one applied is not taken
//! for its continuation: the engine is asked, and what it does not know is dropped.
//!
//! **Taken up.** A stream may begin with what a file of a former gateway says ([`super::persist`]): then its first
//! connection is believed. A replay, or a first live batch that follows the last one, proves it; what was missed and
//! cannot be had leaves it doubtful, where other streams are cleared.
//!
//! **Eligible** is what is proven: `Live`, or `Replaying` unless the connection had been lost with blocks held.
//!
//! **Limits.** Batches that arrive during a replay are kept up to [`HELD_BYTES_MAX`] and [`HELD_BATCHES_MAX`]; what
//! comes then is not kept, counted, and found again as a gap. A replay that makes no progress [`FRUITLESS_MAX`]
//! times in a row has failed; the next is tried at the next gap, restart or connection.

#![forbid(unsafe_code)]

use std::collections::VecDeque;

/// Bytes of live batches kept during a replay.
const HELD_BYTES_MAX: usize = 16 * 1024 * 1024;
/// Live batches kept during a replay.
const HELD_BATCHES_MAX: usize = 65_536;
/// Replays in a row without a batch that was new.
const FRUITLESS_MAX: u8 = 2;

/// What the owner of the stream has to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Action<'a> {
    /// Apply the batch with this sequence number.
    Apply(u64, &'a [u8]),
    /// Forget what the rank holds.
    Clear,
    /// Ask for every batch from this number on; replaces a request under way.
    Replay(u64),
    /// Drop the request under way.
    StopReplay,
    /// What was taken up from a file is what the engine holds, together with what is applied from now on.
    Proven,
    /// Something was missed: all that the rank holds may be gone.
    Doubt,
}

/// Enough of a payload to tell two batches under one number apart: its length and its first bytes, which hold
/// the engine's clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Print {
    pub(crate) head: [u8; 16],
    pub(crate) len: usize,
}

impl Print {
    pub(crate) fn of(payload: &[u8]) -> Self {
        let mut head = [0; 16];
        let len = payload.len().min(head.len());
        head[..len].copy_from_slice(&payload[..len]);
        Print { head, len: payload.len() }
    }

    /// The engine's clock when it made the batch, seconds; none where it stands elsewhere.
    fn clock(self) -> Option<f64> {
        let [_, 0xcb, clock @ ..] = self.head else { return None };
        clock.first_chunk().map(|clock| f64::from_be_bytes(*clock))
    }

    /// Made before another batch.
    fn is_older(self, than: Print) -> bool {
        matches!((self.clock(), than.clock()), (Some(one), Some(other)) if one < other)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Down,
    Live,
    Unproven,
    Replaying(Request),
}

/// Whether the rank began with what a file said of it, in this connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TakenUp {
    No,
    /// And nothing has come since.
    Fresh,
    /// And something was missed since: it stays, unproven.
    Doubtful,
}

/// A replay under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Request {
    /// The connection had been lost while something was held.
    returning: bool,
    /// An answer showed that what is held is of the connected process.
    proven: bool,
    /// No answer yet.
    fresh: bool,
    /// A number was skipped in the answer: the engine dropped replies.
    hole: bool,
    /// Something new was applied since the request.
    progress: bool,
    /// Requests in a row without progress.
    fruitless: u8,
}

impl Request {
    /// The first request of a stream that has nothing to prove.
    const FIRST: Request =
        Request { returning: false, proven: false, fresh: true, hole: false, progress: false, fruitless: 0 };
}

/// What happened so far, for the status.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    pub(crate) reconnects: u64,
    pub(crate) gaps: u64,
    pub(crate) restarts: u64,
    pub(crate) replays: u64,
    /// History that could not be had.
    pub(crate) incomplete: u64,
    /// Live batches not kept.
    pub(crate) overflows: u64,
}

/// The state of one stream.
#[derive(Debug)]
pub(crate) struct Stream {
    phase: Phase,
    /// The last batch applied.
    last: Option<(u64, Print)>,
    /// The last live number seen on this connection.
    live: Option<u64>,
    /// Live numbers up to here were had by replay already.
    replayed: Option<u64>,
    /// A replay showed that the engine has sent nothing yet: a first number above 0 is a gap.
    nothing_sent: bool,
    /// There is a replay address.
    has_replay: bool,
    /// The connection was lost while a replay was under way.
    cut: bool,
    /// A replay has just failed: what was kept meanwhile is taken as it is.
    giving_up: bool,
    /// Replays in a row that ended well and brought nothing, with no live batch in sequence between them.
    barren: u8,
    ever_connected: bool,
    taken_up: TakenUp,
    /// All that the engine ever announced was heard.
    whole: bool,
    held: VecDeque<(u64, Vec<u8>)>,
    held_bytes: usize,
    tally: Tally,
}

impl Stream {
    /// A stream that is not connected and knows nothing.
    pub(crate) fn new(has_replay: bool) -> Self {
        Stream {
            phase: Phase::Down,
            last: None,
            live: None,
            replayed: None,
            nothing_sent: false,
            has_replay,
            cut: false,
            giving_up: false,
            barren: 0,
            ever_connected: false,
            taken_up: TakenUp::No,
            whole: false,
            held: VecDeque::new(),
            held_bytes: 0,
            tally: Tally::default(),
        }
    }

    /// As [`new`](Stream::new), but a file says that `last` was applied last, whether all before it was heard, and
    /// whether some of what is held was unproven even then.
    pub(crate) fn resumed(has_replay: bool, last: Option<(u64, Print)>, whole: bool, unproven: bool) -> Self {
        let taken_up = match last {
            None => TakenUp::No,
            Some(_) if unproven => TakenUp::Doubtful,
            Some(_) => TakenUp::Fresh,
        };
        Stream { last, taken_up, whole: whole && last.is_some(), ..Stream::new(has_replay) }
    }

    /// The last batch applied.
    pub(crate) fn last(&self) -> Option<(u64, Print)> {
        self.last
    }

    /// Whether all that the engine ever announced was heard, as far as is known.
    pub(crate) fn is_whole(&self) -> bool {
        self.whole && self.taken_up == TakenUp::No
    }

    /// Nothing that the rank holds is unproven any more.
    pub(crate) fn settle(&mut self) {
        if self.taken_up == TakenUp::Doubtful {
            self.taken_up = TakenUp::No;
        }
    }

    pub(crate) fn tally(&self) -> Tally {
        self.tally
    }

    /// The last sequence number applied.
    pub(crate) fn last_seq(&self) -> Option<u64> {
        self.last.map(|(seq, _)| seq)
    }

    pub(crate) fn is_connected(&self) -> bool {
        self.phase != Phase::Down
    }

    /// Whether the blocks held may be routed by.
    pub(crate) fn is_eligible(&self) -> bool {
        match self.phase {
            Phase::Down | Phase::Unproven => false,
            Phase::Live => true,
            Phase::Replaying(request) => !request.returning || self.taken_up != TakenUp::No,
        }
    }

    /// Whether the request under way is to prove blocks held from before the connection.
    pub(crate) fn is_returning(&self) -> bool {
        matches!(self.phase, Phase::Replaying(request) if request.returning)
    }

    /// A publisher is there. Where one was already, the end of its connection has not been noticed yet: another process
    /// may stand behind the new one.
    pub(crate) fn connected(&mut self, act: &mut impl FnMut(Action<'_>)) {
        if self.phase != Phase::Down {
            self.lost(act);
        }
        self.tally.reconnects += u64::from(std::mem::replace(&mut self.ever_connected, true));
        self.live = None;
        self.replayed = None;
        self.nothing_sent = false;
        self.barren = 0;
        match (self.has_replay, self.last) {
            (true, last) => {
                let returning = last.is_some();
                self.request(self.last_seq(), Request { returning, ..Request::FIRST }, act);
            }
            (false, Some(_)) if self.taken_up == TakenUp::No => self.phase = Phase::Unproven,
            (false, _) => self.phase = Phase::Live,
        }
    }

    /// No publisher is there any more.
    pub(crate) fn lost(&mut self, act: &mut impl FnMut(Action<'_>)) {
        self.cut = matches!(self.phase, Phase::Replaying(_));
        if self.cut {
            act(Action::StopReplay);
        }
        self.phase = Phase::Down;
        // What comes back may be another process: it has to prove itself, like any other.
        self.taken_up = TakenUp::No;
        // What was kept is after a gap, or comes again from the replay that the next connection begins with.
        self.held.clear();
        self.held_bytes = 0;
    }

    /// No publisher has been there for so long that what is held is given up.
    pub(crate) fn expired(&mut self, act: &mut impl FnMut(Action<'_>)) {
        if self.phase == Phase::Down && self.last.take().is_some() {
            self.whole = false;
            act(Action::Clear);
        }
    }

    /// A live batch.
    pub(crate) fn live(&mut self, seq: u64, payload: &[u8], act: &mut impl FnMut(Action<'_>)) {
        if let Phase::Replaying(_) = self.phase {
            return self.hold(seq, payload);
        }
        if self.phase == Phase::Down && self.has_replay && (self.cut || !self.follows(seq, payload)) {
            // Taken now, it would be what the next connection's replay begins with, and hide what goes before it.
            return;
        }
        let before = self.live.replace(seq);
        let Some((last, print)) = self.last else {
            if std::mem::take(&mut self.nothing_sent) && seq > 0 {
                return self.gap(seq, None, payload, act);
            }
            // The first batch known, wherever the engine's count stands: each key says all by itself.
            return self.accept(seq, payload, act);
        };
        // Without an answer to be had, numbers alone decide.
        let stale = self.is_answered() && Print::of(payload).is_older(print);
        if last.checked_add(1) == Some(seq) && !stale {
            self.prove(act);
            self.accept(seq, payload, act);
        } else if seq == last && print == Print::of(payload) {
            self.prove(act);
            self.proven();
        } else if seq > last && stale && self.barren >= FRUITLESS_MAX {
            // The engine does not know it: it was still on its way when the process that sent it was gone. What comes
            // behind it may be asked for.
            self.live = before;
            self.giving_up = false;
        } else if seq > last {
            self.gap(seq, Some(last), payload, act);
        } else if self.replayed.is_some_and(|to| seq <= to)
            && before.is_none_or(|before| seq >= before)
            && !print.is_older(Print::of(payload))
        {
            // The replay was ahead of the live stream, which now brings the same batch.
        } else {
            self.restarted(act);
            if seq > 0 && self.is_answered() {
                self.request(None, Request::FIRST, act);
                self.hold(seq, payload);
            } else {
                self.tally.incomplete += u64::from(seq > 0);
                self.accept(seq, payload, act);
            }
        }
    }

    /// Whether a batch is the next of what was applied, or the very first.
    fn follows(&self, seq: u64, payload: &[u8]) -> bool {
        match self.last {
            None => seq == 0,
            Some((last, print)) => last.checked_add(1) == Some(seq) && !Print::of(payload).is_older(print),
        }
    }

    fn gap(&mut self, seq: u64, last: Option<u64>, payload: &[u8], act: &mut impl FnMut(Action<'_>)) {
        self.tally.gaps += 1;
        if self.may_replay() {
            let returning = self.phase == Phase::Unproven;
            self.request(last, Request { returning, ..Request::FIRST }, act);
            self.hold(seq, payload);
        } else {
            self.missed(act);
            self.accept(seq, payload, act);
        }
    }

    /// Something was missed that cannot be had.
    fn missed(&mut self, act: &mut impl FnMut(Action<'_>)) {
        self.tally.incomplete += 1;
        self.whole = false;
        if self.taken_up == TakenUp::No {
            self.last = None;
            act(Action::Clear);
        } else {
            self.taken_up = TakenUp::Doubtful;
            act(Action::Doubt);
        }
    }

    /// Nothing was missed since the file was written.
    fn prove(&mut self, act: &mut impl FnMut(Action<'_>)) {
        if self.taken_up == TakenUp::Fresh {
            self.taken_up = TakenUp::No;
            act(Action::Proven);
        }
    }

    /// A batch of the replay under way.
    pub(crate) fn replayed(&mut self, seq: u64, payload: &[u8], act: &mut impl FnMut(Action<'_>)) {
        let Phase::Replaying(mut request) = self.phase else { return };
        let fresh = std::mem::replace(&mut request.fresh, false);
        let mut apply = false;
        match self.last {
            None => {
                self.tally.incomplete += u64::from(seq > 0);
                apply = true;
            }
            Some((last, print)) if fresh => {
                if seq > last {
                    // The engine has forgotten the batch that would prove anything.
                    self.missed(act);
                    apply = true;
                } else if (seq, Print::of(payload)) != (last, print) {
                    self.restarted(act);
                    return self.request(None, Request::FIRST, act);
                } else {
                    // What is missing comes next; meanwhile it counts as it did.
                    request.returning &= self.taken_up == TakenUp::No;
                    self.prove(act);
                }
                request.proven = true;
            }
            Some((last, _)) if last.checked_add(1) == Some(seq) => apply = true,
            Some((last, _)) => request.hole |= seq > last,
        }
        if apply {
            request.progress = true;
            request.proven = true;
            self.whole |= self.last.is_none() && seq == 0;
            self.last = Some((seq, Print::of(payload)));
            act(Action::Apply(seq, payload));
        }
        self.phase = Phase::Replaying(request);
    }

    /// The replay under way said that it is at its end.
    pub(crate) fn replay_ended(&mut self, act: &mut impl FnMut(Action<'_>)) {
        let Phase::Replaying(request) = self.phase else { return };
        if request.fresh && self.last.is_some() {
            // The engine never sent the batch we applied last.
            self.restarted(act);
            self.request(None, Request::FIRST, act);
        } else if request.hole {
            self.again(request, act);
        } else {
            self.tally.replays += 1;
            act(Action::StopReplay);
            self.replayed = self.last_seq();
            self.nothing_sent = self.last.is_none();
            self.whole |= self.nothing_sent && self.held.is_empty();
            self.phase = Phase::Live;
            // An engine whose replays never reach what it sent live would be asked for ever.
            self.barren = if request.progress { 0 } else { self.barren.saturating_add(1) };
            self.giving_up = self.barren >= FRUITLESS_MAX;
            self.feed_held(act);
            self.giving_up = false;
        }
    }

    /// The replay under way fell silent.
    pub(crate) fn replay_timed_out(&mut self, act: &mut impl FnMut(Action<'_>)) {
        if let Phase::Replaying(request) = self.phase {
            self.again(request, act);
        }
    }

    /// Nothing answers at the replay address.
    pub(crate) fn replay_failed(&mut self, act: &mut impl FnMut(Action<'_>)) {
        let Phase::Replaying(request) = self.phase else { return };
        self.tally.incomplete += 1;
        act(Action::StopReplay);
        let unproven = request.returning && !request.proven;
        self.phase = if unproven && self.taken_up == TakenUp::No { Phase::Unproven } else { Phase::Live };
        // Only what an answer brought can be read again: a lower number without one is a restart.
        self.replayed = if unproven { None } else { self.last_seq() };
        self.barren = 0;
        self.giving_up = true;
        self.feed_held(act);
        self.giving_up = false;
    }

    fn again(&mut self, before: Request, act: &mut impl FnMut(Action<'_>)) {
        let fruitless = if before.progress { 0 } else { before.fruitless + 1 };
        if fruitless >= FRUITLESS_MAX {
            return self.replay_failed(act);
        }
        let Request { returning, proven, .. } = before;
        self.request(self.last_seq(), Request { returning, proven, fruitless, ..Request::FIRST }, act);
    }

    fn may_replay(&self) -> bool {
        self.is_answered() && !self.giving_up
    }

    /// There is a replay address, and no request has just failed there; that the last ones brought nothing is no failure.
    fn is_answered(&self) -> bool {
        let failed = self.giving_up && self.barren < FRUITLESS_MAX;
        self.has_replay && !failed && self.phase != Phase::Down
    }

    fn request(&mut self, from: Option<u64>, request: Request, act: &mut impl FnMut(Action<'_>)) {
        self.phase = Phase::Replaying(request);
        act(Action::Replay(from.unwrap_or(0)));
    }

    fn restarted(&mut self, act: &mut impl FnMut(Action<'_>)) {
        self.tally.restarts += 1;
        self.last = None;
        self.replayed = None;
        self.taken_up = TakenUp::No;
        self.whole = false;
        act(Action::Clear);
    }

    fn accept(&mut self, seq: u64, payload: &[u8], act: &mut impl FnMut(Action<'_>)) {
        self.whole |= self.last.is_none() && seq == 0;
        self.last = Some((seq, Print::of(payload)));
        self.barren = 0;
        self.proven();
        act(Action::Apply(seq, payload));
    }

    /// What is held is what the connected engine holds. Batches still read after a loss prove nothing.
    fn proven(&mut self) {
        if self.phase == Phase::Unproven {
            self.phase = Phase::Live;
        }
    }

    fn hold(&mut self, seq: u64, payload: &[u8]) {
        if self.held.len() >= HELD_BATCHES_MAX || self.held_bytes + payload.len() > HELD_BYTES_MAX {
            self.tally.overflows += 1;
            return;
        }
        self.held_bytes += payload.len();
        self.held.push_back((seq, payload.to_vec()));
    }

    fn feed_held(&mut self, act: &mut impl FnMut(Action<'_>)) {
        self.held_bytes = 0;
        // The batch that led to the replay is the first of these, and was seen already.
        self.live = None;
        for (seq, payload) in std::mem::take(&mut self.held) {
            self.live(seq, &payload, act);
        }
    }
}

#[cfg(test)]
#[path = "stream_tests.rs"]
mod tests;
