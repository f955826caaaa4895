//! One rank's event source: its sockets, its stream state, and the holder that its events write.

mod take_up;

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use shards::ids::{EndpointIndex, HolderIndex, Rank};
use shards::inventory::{Medium, OPS_PER_PUBLISH_MAX, SpaceIndex, Writer};

use super::calibrate::{Finding, Verdict};
use super::copies::{Copies, Keying, Op};
use super::events::{Reject, clock};
use super::framing::Framed;
use super::parity::UseStats;
use super::poller::Poller;
use super::sockets::{Contexts, Frames, Link, Watched};
use super::status::{Replay, Started, StreamName, StreamStats, add};
use super::stream::{Action, Stream};
use super::{Mode, RankSource};
use take_up::Asleep;
pub(crate) use take_up::Mark;

/// Messages taken from one source before the others have their turn.
const MESSAGES_PER_VISIT: usize = 64;
/// Refused connections after which a replay address counts as missing: at once for a rank that has nothing to prove,
/// since its live events wait for it; a little later where blocks are at stake, since an engine that
/// comes back opens its event socket first.
const REFUSALS_MAX: u32 = 1;
const REFUSALS_MAX_RETURNING: u32 = 3;

/// What the whole thread shares with each source it visits.
pub(crate) struct Io<'a> {
    pub(crate) contexts: &'a mut Contexts,
    pub(crate) poller: &'a Poller,
    pub(crate) frames: &'a mut Frames,
    pub(crate) replay_timeout: Duration,
}

/// One (endpoint, rank) stream with its sockets.
pub(crate) struct Source {
    pub(crate) name: StreamName,
    pub(crate) from: RankSource,
    pub(crate) stats: Arc<StreamStats>,
    endpoint: EndpointIndex,
    /// Place of the rank among the endpoint's copies.
    place: usize,
    /// What the poller reports for its sockets.
    token: u64,
    stream: Stream,
    socket: Option<Watched>,
    /// Connections of the socket that are open.
    links: HashSet<i32>,
    /// Since when none is, after there was one.
    lost_at: Option<Instant>,
    replay: Option<ReplayRequest>,
    /// None while the inventory has no slot to give.
    holder: Option<Held>,
    /// Holders of what lies in slower media or nearer, from the first such block on.
    wide: Wide,
    /// How its keys are to be read.
    keying: Keying,
    /// What the inventory was told.
    eligible: bool,
    /// What the log has said of its keys.
    finding: Finding,
    /// Block size the log has complained of.
    complained_of: u32,
    /// Its state file comes first.
    asleep: Option<Asleep>,
    /// What the inventory began with; none until the connection shows it.
    started: Option<Started>,
    /// Replays before the inventory began.
    replays_before: u64,
    /// What it was like when it was written last.
    written: Mark,
}

/// The host's memory, and what lies behind it.
type Wide = [Option<Held>; 2];

/// A slot of the inventory.
#[derive(Clone, Copy)]
struct Held {
    holder: HolderIndex,
    /// Prompts can be compared with its keys.
    routable: bool,
}

struct ReplayRequest {
    from: u64,
    socket: Option<Watched>,
    refusals: u32,
    deadline: Instant,
}

/// What one visit left to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Left {
    Nothing,
    /// Messages are left to read.
    More,
}

/// Where the actions of a stream take effect.
struct Applier<'a> {
    copies: &'a mut Copies,
    place: usize,
    writer: &'a mut Writer,
    endpoint: EndpointIndex,
    rank: Rank,
    held: &'a mut Option<Held>,
    wide: &'a mut Wide,
    keying: &'a mut Keying,
    eligible: bool,
    /// What comes is no replay.
    live: bool,
    stats: &'a StreamStats,
    started: &'a mut Option<Started>,
    request: Request,
}

/// The replay that is to be under way from now on: as it is, none, or one from a number on.
pub(crate) type Request = Option<Option<u64>>;

impl Applier<'_> {
    fn act(&mut self, action: Action<'_>) {
        match action {
            Action::Apply(seq, payload) => {
                add(&self.stats.batches, 1);
                self.stats.next_seq.store(seq.saturating_add(1), Ordering::Relaxed);
                let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
                self.stats.last_event_ms.store(now.as_millis() as u64, Ordering::Relaxed);
                if self.live {
                    let lag = clock(payload).map_or(0.0, |made| now.as_secs_f64() - made);
                    // A clock that is ahead of ours is no lag; the cast saturates.
                    self.stats.lag_us.store((lag * 1e6) as u64, Ordering::Relaxed);
                }
                self.change(|copies, place, stats, op| copies.apply(place, payload, stats, &mut |each| op(each)));
            }
            Action::Clear => {
                self.copies.verify_again(self.place);
                *self.started = None;
                self.change(|copies, place, stats, op| copies.clear(place, stats, &mut |each| op(each)));
            }
            Action::Replay(from) => self.request = Some(Some(from)),
            Action::StopReplay => self.request = Some(None),
            Action::Proven => self.copies.prove(self.place),
            Action::Doubt => self.copies.doubt(self.place),
        }
    }

    fn change(&mut self, change: impl FnOnce(&mut Copies, usize, &StreamStats, &mut dyn FnMut(Op))) {
        let Applier { copies, place, writer, endpoint, rank, held, wide, keying, eligible, stats, .. } = self;
        let mut since_publish = 0;
        change(copies, *place, stats, &mut |op| {
            if let Op::Rekey(new) = op {
                **keying = new;
            }
            match (op, held.map(|held| held.holder)) {
                (Op::Store(key), Some(holder)) => writer.store(key, holder),
                (Op::Remove(key), Some(holder)) => writer.remove(key, holder),
                (Op::Follow(before), _) => writer.follow(before),
                (Op::Clear | Op::Rekey(_), old) => {
                    retire(old, wide, writer);
                    **held = add_holder(writer, Medium::Device, *endpoint, *rank, **keying, *eligible);
                }
                (Op::Wide { medium, key, held }, _) => {
                    let Some(slot) = wide.get_mut((medium as usize).wrapping_sub(1)) else { return };
                    if slot.is_none() && held {
                        // Without a slot these blocks count for nothing until the rank is emptied.
                        *slot = add_holder(writer, medium, *endpoint, *rank, **keying, *eligible);
                    }
                    match slot {
                        Some(wide) if held => writer.store(key, wide.holder),
                        Some(wide) => writer.remove(key, wide.holder),
                        None => {}
                    }
                }
                // Without a slot the copies go on; the holder gets them all when there is one again.
                (_, None) => {}
            }
            since_publish += 1;
            if since_publish >= OPS_PER_PUBLISH_MAX {
                since_publish = 0;
                // Refused: the queue holds the rest for the end of the cycle.
                let _ = writer.try_publish();
            }
        });
    }
}

/// A holder for keys of that kind; none where the inventory has no slot. Keys that are not to be routed by, or that
/// would need one key space too many, are those of a holder that is never eligible.
fn add_holder(
    writer: &mut Writer,
    medium: Medium,
    endpoint: EndpointIndex,
    rank: Rank,
    keying: Keying,
    eligible: bool,
) -> Option<Held> {
    let space = match keying {
        Keying::Rule => Some(SpaceIndex::OWN),
        Keying::Space(space) => writer.space(space),
        Keying::Refused => None,
    };
    let holder = writer.add_holder_to(medium, space.unwrap_or(SpaceIndex::OWN), endpoint, rank)?;
    let routable = space.is_some();
    if !eligible || !routable {
        writer.set_eligible(holder, false);
    }
    Some(Held { holder, routable })
}

/// Gives the slots of a rank back.
fn retire(holder: Option<HolderIndex>, wide: &mut Wide, writer: &mut Writer) {
    let wide = wide.iter_mut().filter_map(Option::take).map(|held| held.holder);
    holder.into_iter().chain(wide).for_each(|holder| writer.retire_holder(holder));
}

impl Source {
    /// A source without sockets.
    pub(crate) fn new(
        name: StreamName,
        from: RankSource,
        place: usize,
        token: u64,
        by_use: &Arc<UseStats>,
        writer: &mut Writer,
    ) -> Self {
        Source {
            endpoint: name.endpoint,
            place,
            token,
            stream: Stream::new(from.replay.is_some()),
            socket: None,
            links: HashSet::new(),
            lost_at: None,
            replay: None,
            holder: add_holder(writer, Medium::Device, name.endpoint, name.rank, Keying::Rule, false),
            wide: Wide::default(),
            keying: Keying::Rule,
            eligible: false,
            finding: Finding::default(),
            complained_of: 0,
            asleep: None,
            started: None,
            replays_before: 0,
            written: Mark::default(),
            stats: Arc::new(StreamStats { by_use: Arc::clone(by_use), ..StreamStats::default() }),
            name,
            from,
        }
    }

    /// Opens its socket; where the address is refused it stays closed, and the log says why.
    fn open_socket(&mut self, io: &mut Io<'_>) {
        let (address, bind) = match &self.from.mode {
            Mode::Connect(address) => (address, false),
            Mode::Bind(address) => (address, true),
        };
        let socket = io.contexts.subscriber(address, bind).and_then(|socket| {
            watch(io.poller, &socket, self.token)?;
            Ok(socket)
        });
        self.socket = match socket {
            Ok(socket) => Some(socket),
            Err(error) => {
                tracing::error!(
                    endpoint = self.name.label, rank = self.name.rank.0, address, %error,
                    "the address of the engine's KV events cannot be used; correct it: until then no prompt is routed there by its cache"
                );
                None
            }
        };
    }

    /// Closes the sockets and gives the holder back.
    pub(crate) fn close(mut self, writer: &mut Writer, poller: &Poller) {
        self.drop_replay(poller);
        if let Some(socket) = &self.socket {
            forget(poller, socket);
        }
        retire(self.holder.map(|held| held.holder), &mut self.wide, writer);
    }

    /// Reads what has come, up to a bound, and applies it.
    pub(crate) fn visit(&mut self, copies: &mut Copies, writer: &mut Writer, io: &mut Io<'_>) -> Left {
        // The monitor first: what it reports happened before anything that the socket brings afterwards.
        while let Some(link) = self.socket.as_ref().and_then(Watched::link) {
            let request = self.linked(link, copies, writer);
            self.request(request, io);
        }
        let mut left = self.read_replay(copies, writer, io);
        for _ in 0..MESSAGES_PER_VISIT {
            if !self.socket.as_ref().is_some_and(|socket| socket.receive(io.frames)) {
                self.note(copies);
                return left;
            }
            let request = self.published(io.frames.published(), copies, writer);
            self.request(request, io);
        }
        left = Left::More;
        self.note(copies);
        left
    }

    /// Takes a message of the publisher.
    pub(crate) fn published(&mut self, framed: Framed<'_>, copies: &mut Copies, writer: &mut Writer) -> Request {
        match framed {
            Framed::Batch(seq, payload) => {
                self.step(copies, writer, |stream, act| stream.live(seq, payload, &mut |a| act(a)))
            }
            Framed::End | Framed::Malformed => {
                self.stats.reject(Reject::Frames);
                None
            }
        }
    }

    /// Takes a message of the replay under way.
    pub(crate) fn replayed(&mut self, framed: Framed<'_>, copies: &mut Copies, writer: &mut Writer) -> Request {
        match framed {
            Framed::Batch(seq, payload) => {
                self.step(copies, writer, |stream, act| stream.replayed(seq, payload, &mut |a| act(a)))
            }
            Framed::End => {
                self.stats.set_replay(Replay::Works);
                self.step(copies, writer, |stream, act| stream.replay_ended(&mut |a| act(a)))
            }
            Framed::Malformed => {
                self.stats.reject(Reject::Frames);
                None
            }
        }
    }

    /// The replay under way is silent.
    pub(crate) fn replay_silent(&mut self, copies: &mut Copies, writer: &mut Writer) -> Request {
        self.step(copies, writer, |stream, act| stream.replay_timed_out(&mut |a| act(a)))
    }

    /// Gives up or repeats a replay that is overdue; false where none is under way.
    pub(crate) fn check_replay(
        &mut self,
        now: Instant,
        copies: &mut Copies,
        writer: &mut Writer,
        io: &mut Io<'_>,
    ) -> bool {
        if self.replay.as_ref().is_some_and(|request| request.deadline <= now) {
            let request = self.replay_silent(copies, writer);
            self.request(request, io);
            self.note(copies);
        }
        self.replay.is_some()
    }

    /// Gives up what is kept of an engine that has been gone for longer than that; true if it did.
    pub(crate) fn expire(&mut self, now: Instant, after: Duration, copies: &mut Copies, writer: &mut Writer) -> bool {
        if self.lost_at.is_none_or(|lost| now.saturating_duration_since(lost) < after) {
            return false;
        }
        self.lost_at = None;
        // Without a connection nothing is asked for.
        let _ = self.step(copies, writer, |stream, act| stream.expired(&mut |a| act(a)));
        self.note(copies);
        true
    }

    /// False where the address was refused.
    pub(crate) fn is_open(&self) -> bool {
        self.socket.is_some() || self.is_asleep()
    }

    /// Times that its blocks were given up all at once.
    pub(crate) fn clears(&self) -> u64 {
        self.stats.clears.load(Ordering::Relaxed)
    }

    /// Whether its blocks are what its engine holds.
    pub(crate) fn is_eligible(&self) -> bool {
        self.eligible
    }

    /// Whether the inventory had no slot for it.
    pub(crate) fn lacks_holder(&self) -> bool {
        self.holder.is_none()
    }

    /// Whether a replay is under way.
    pub(crate) fn is_replaying(&self) -> bool {
        self.replay.is_some()
    }

    /// Asks for a holder again where the inventory had no slot.
    pub(crate) fn repair(&mut self, copies: &Copies, writer: &mut Writer) {
        if self.holder.is_none() {
            self.holder = add_holder(writer, Medium::Device, self.endpoint, self.name.rank, self.keying, self.eligible);
            if let Some(held) = self.holder {
                copies.keys(self.place).for_each(|key| writer.store(key, held.holder));
            }
        }
    }

    /// Does something to the rank's copies and, with them, to its holder.
    fn with_applier<T>(
        &mut self,
        copies: &mut Copies,
        writer: &mut Writer,
        act: impl FnOnce(&mut Stream, &mut Applier<'_>) -> T,
    ) -> T {
        let mut applier = Applier {
            copies,
            place: self.place,
            writer,
            endpoint: self.endpoint,
            rank: self.name.rank,
            held: &mut self.holder,
            wide: &mut self.wide,
            keying: &mut self.keying,
            eligible: self.eligible,
            live: self.replay.is_none(),
            stats: &self.stats,
            started: &mut self.started,
            request: None,
        };
        act(&mut self.stream, &mut applier)
    }

    /// Runs one step of the stream and carries out what it asks for, but for the replay request it returns.
    fn step(
        &mut self,
        copies: &mut Copies,
        writer: &mut Writer,
        step: impl FnOnce(&mut Stream, &mut dyn FnMut(Action<'_>)),
    ) -> Request {
        let had_begun = self.started.is_some();
        let request = self.with_applier(copies, writer, |stream, applier| {
            step(stream, &mut |action| applier.act(action));
            if !applier.copies.is_unproven(applier.place) {
                stream.settle();
            }
            applier.request
        });
        if had_begun && self.started.is_none() {
            self.replays_before = self.stream.tally().replays;
        }
        if self.stream.is_eligible() != self.eligible {
            self.eligible = !self.eligible;
            let holders = self.wide.iter().chain([&self.holder]).flatten();
            for held in holders.filter(|held| held.routable) {
                writer.set_eligible(held.holder, self.eligible);
            }
        }
        request
    }

    /// Takes what became of a connection.
    pub(crate) fn linked(&mut self, link: Link, copies: &mut Copies, writer: &mut Writer) -> Request {
        let (endpoint, rank) = (&self.name.label, self.name.rank.0);
        match link {
            Link::Opened(number) => {
                self.links.insert(number);
                None
            }
            Link::Retried => None,
            Link::Ready => {
                tracing::info!(endpoint, rank, address = self.name.address, "KV events: connected");
                copies.verify_again(self.place);
                self.lost_at = None;
                self.step(copies, writer, |stream, act| stream.connected(&mut |a| act(a)))
            }
            Link::Closed(number) => {
                self.links.remove(&number);
                if !self.links.is_empty() || !self.stream.is_connected() {
                    return None;
                }
                tracing::warn!(
                    endpoint,
                    rank,
                    address = self.name.address,
                    "KV events: connection lost; the rank's blocks do not count until it is back"
                );
                self.lost_at = Some(Instant::now());
                let request = self.step(copies, writer, |stream, act| stream.lost(&mut |a| act(a)));
                // A mask is worth a publish of its own.
                let _ = writer.try_publish();
                request
            }
        }
    }

    fn request(&mut self, request: Request, io: &mut Io<'_>) {
        let Some(request) = request else { return };
        self.drop_replay(io.poller);
        let (Some(from), Some(address), Some(stream)) = (request, &self.from.replay, &self.socket) else { return };
        let socket = io.contexts.replay(stream, address, from).and_then(|socket| {
            watch(io.poller, &socket, self.token)?;
            Ok(socket)
        });
        let socket = socket.inspect_err(|error| {
            tracing::warn!(endpoint = self.name.label, rank = self.name.rank.0, address, %error, "the replay address cannot be used");
        });
        // Without a socket the next visit or time-out sees the failure.
        let deadline = Instant::now() + io.replay_timeout;
        self.replay = Some(ReplayRequest { from, socket: socket.ok(), refusals: 0, deadline });
    }

    fn drop_replay(&mut self, poller: &Poller) {
        if let Some(ReplayRequest { socket: Some(socket), .. }) = self.replay.take() {
            forget(poller, &socket);
        }
    }

    fn read_replay(&mut self, copies: &mut Copies, writer: &mut Writer, io: &mut Io<'_>) -> Left {
        for _ in 0..MESSAGES_PER_VISIT {
            let Some(under_way) = &mut self.replay else { return Left::Nothing };
            let refusals_max = if self.stream.is_returning() { REFUSALS_MAX_RETURNING } else { REFUSALS_MAX };
            let request = match &under_way.socket {
                Some(socket) => {
                    while let Some(link) = socket.link() {
                        under_way.refusals += u32::from(link == Link::Retried);
                    }
                    if !socket.receive(io.frames) {
                        if under_way.refusals < refusals_max {
                            return Left::Nothing;
                        }
                        self.replay_missing(copies, writer)
                    } else {
                        under_way.deadline = Instant::now() + io.replay_timeout;
                        self.replayed(io.frames.replayed(), copies, writer)
                    }
                }
                None => self.replay_missing(copies, writer),
            };
            self.request(request, io);
        }
        Left::More
    }

    /// Nothing answers at the replay address.
    pub(crate) fn replay_missing(&mut self, copies: &mut Copies, writer: &mut Writer) -> Request {
        if self.stats.replay.load(Ordering::Relaxed) != Replay::Missing as u32 {
            tracing::info!(
                endpoint = self.name.label,
                rank = self.name.rank.0,
                address = self.from.replay,
                from = self.replay.as_ref().map(|request| request.from),
                "no replay endpoint: what the engine announced before cannot be asked for"
            );
        }
        self.stats.set_replay(Replay::Missing);
        self.step(copies, writer, |stream, act| stream.replay_failed(&mut |a| act(a)))
    }

    /// Brings the status up to date.
    pub(crate) fn note(&mut self, copies: &Copies) {
        match copies.finding(self.place) {
            Some(finding) => self.note_finding(finding),
            None => self.note_block_size(),
        }
        self.note_start();
        let stats = &*self.stats;
        stats.set_started(self.started);
        stats.whole.store(self.stream.is_whole(), Ordering::Relaxed);
        stats.degraded.store(copies.is_unproven(self.place), Ordering::Relaxed);
        let tally = self.stream.tally();
        stats.connected.store(self.stream.is_connected(), Ordering::Relaxed);
        let routable = self.holder.is_none_or(|held| held.routable);
        stats.eligible.store(self.eligible && routable, Ordering::Relaxed);
        for (counter, value) in [
            (&stats.reconnects, tally.reconnects),
            (&stats.gaps, tally.gaps),
            (&stats.restarts, tally.restarts),
            (&stats.replays, tally.replays),
            (&stats.incomplete, tally.incomplete),
            (&stats.overflows, tally.overflows),
        ] {
            counter.store(value, Ordering::Relaxed);
        }
    }

    /// Says how the rank's blocks are keyed, once per change.
    fn note_finding(&mut self, found: &Finding) {
        let no_space = matches!(self.keying, Keying::Space(_)) && self.holder.is_some_and(|held| !held.routable);
        let refused = no_space && found.verdict != Verdict::Refused;
        let same = found.detail == self.finding.detail && refused == (self.finding.verdict != found.verdict);
        if same && found.faults == self.finding.faults && found.hints == self.finding.hints {
            return;
        }
        self.finding = found.clone();
        if refused {
            self.finding.verdict = Verdict::Refused;
        }
        let (endpoint, rank, finding) = (&self.name.label, self.name.rank.0, &self.finding);
        if finding.faults.is_empty() {
            tracing::info!(endpoint, rank, %finding, "parity");
        } else {
            tracing::warn!(endpoint, rank, %finding, refused_for_want_of_a_key_space = refused, "parity");
        }
        self.stats.set_finding(finding.clone());
    }

    /// Complains of blocks that do not enter, where nothing finds out why.
    fn note_block_size(&mut self) {
        let engine = self.stats.engine_block_tokens.load(Ordering::Relaxed);
        if engine != self.complained_of {
            self.complained_of = engine;
            tracing::warn!(
                endpoint = self.name.label,
                rank = self.name.rank.0,
                engine_block_tokens = engine,
                "block_size_mismatch: the engine's KV blocks are not of the rule's kvBlockSize, so none of them can be routed by; set kvBlockSize to the engine's"
            );
        }
    }
}

fn watch(poller: &Poller, socket: &Watched, token: u64) -> Result<(), super::sockets::Error> {
    for descriptor in socket.descriptors()? {
        poller.watch(descriptor, token)?;
    }
    Ok(())
}

fn forget(poller: &Poller, socket: &Watched) {
    for descriptor in socket.descriptors().into_iter().flatten() {
        poller.forget(descriptor);
    }
}
