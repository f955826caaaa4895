//! The worker's part in remembering what engines hold: which rank is copied for its file when, which is taken up, and
//! what engines' `usage` says of what could not be known otherwise.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, Sender, bounded};
use shards::ids::EndpointIndex;

use super::super::persist::{Answer, Captured, Files, Identity, Image, Loaded, Progress, Share, Write};
use super::super::source::Source;
use super::{Endpoint, Left, Mode, PENDING_MAX, Place, TableId, Worker};

/// Keys copied, or taken up, in one cycle: some 50 µs.
const KEYS_PER_CYCLE: usize = 4096;
/// Files read and not yet taken up.
const LOADED_MAX: usize = 2;
/// Longest time without a file read while some are waited for: then the disk is given up.
const LOAD_PATIENCE: Duration = Duration::from_secs(10);
/// Longest wait for one file at the end of the process.
const WRITE_PATIENCE: Duration = Duration::from_secs(10);
/// How often statements about endpoints are looked for while any is wanted.
pub(super) const TICK_USAGE: Duration = Duration::from_millis(20);
/// How often the keeper goes on with what is under way.
pub(super) const TICK_KEEP: Duration = Duration::from_millis(1);

/// What one worker remembers for, and from, the state directory.
pub(super) struct Keeper {
    files: Files,
    /// Of every source.
    shares: BTreeMap<u64, Share>,
    period: Duration,
    /// When the next round of writing begins.
    due: Instant,
    /// Sources to be written in this round.
    round: VecDeque<u64>,
    /// A write is under way at the helper.
    busy: Arc<AtomicBool>,
    answers: Sender<Loaded>,
    loaded: Receiver<Loaded>,
    /// Sources whose files are read.
    waiting: BTreeSet<u64>,
    /// Sources that are taking theirs up.
    taking: BTreeSet<u64>,
    /// When the last file was asked for or came.
    heard: Instant,
}

impl Keeper {
    pub(super) fn new(files: Files, period: Duration) -> Self {
        let (answers, loaded) = bounded(LOADED_MAX);
        let now = Instant::now();
        Keeper {
            files,
            shares: BTreeMap::new(),
            period,
            due: now + period,
            round: VecDeque::new(),
            busy: Arc::default(),
            answers,
            loaded,
            waiting: BTreeSet::new(),
            taking: BTreeSet::new(),
            heard: now,
        }
    }

    /// How soon it has to be visited again.
    pub(super) fn tick(&self) -> Duration {
        let under_way = !self.round.is_empty() || !self.taking.is_empty();
        if under_way { TICK_KEEP } else { self.period }
    }
}

impl Worker {
    /// Begins a source: with its state file, if there is a place for such.
    pub(super) fn begin_source(&mut self, token: u64) {
        let Some(identity) = self.identity(token) else { return };
        let waker = self.poller.waker();
        let Some((source, _)) = self.source(token) else { return };
        let stats = Arc::clone(&source.stats);
        if let Some(keeper) = &mut self.keeper {
            let answer = Answer { token, stats, loaded: keeper.answers.clone(), waker };
            let share = keeper.files.join(identity);
            let asked = keeper.files.load(&share, answer);
            keeper.shares.insert(token, share);
            if asked {
                keeper.waiting.insert(token);
                keeper.heard = Instant::now();
                if let Some((source, _)) = self.source(token) {
                    source.sleep();
                }
                return;
            }
        }
        self.wake_source(token);
    }

    fn wake_source(&mut self, token: u64) {
        self.with_source(token, |source, _, _, io| source.wake(io));
        self.ready.insert(token);
    }

    fn identity(&self, token: u64) -> Option<Identity> {
        let place = self.places.get(&token)?;
        let service = self.services.get(&place.service)?;
        let source = service.endpoints.get(&place.endpoint)?.sources.get(place.source)?;
        Some(service.identity(source))
    }

    /// Goes on with what is under way: files to take up, ranks to write.
    pub(super) fn keep(&mut self) -> Left {
        if self.keeper.is_none() {
            return Left::Nothing;
        }
        self.take_what_was_read();
        let taking = self.keeper.as_ref().map(|keeper| keeper.taking.clone()).unwrap_or_default();
        for token in &taking {
            self.take_up(*token);
        }
        self.write_next();
        if taking.is_empty() { Left::Nothing } else { Left::More }
    }

    fn take_what_was_read(&mut self) {
        let now = Instant::now();
        let Some(keeper) = &mut self.keeper else { return };
        let mut begin = Vec::new();
        while keeper.taking.len() + begin.len() < LOADED_MAX
            && let Ok(Loaded { token, image }) = keeper.loaded.try_recv()
        {
            keeper.heard = now;
            // One that was given up, or is gone, wants it no more.
            if keeper.waiting.remove(&token) {
                begin.push((token, image));
            }
        }
        if !keeper.waiting.is_empty() && keeper.taking.is_empty() && now > keeper.heard + LOAD_PATIENCE {
            tracing::warn!(
                ranks = keeper.waiting.len(),
                "state files cannot be read in time: these ranks start without"
            );
            begin.extend(std::mem::take(&mut keeper.waiting).into_iter().map(|token| (token, None)));
        }
        for (token, image) in begin {
            match image {
                Some(image) => self.begin_take_up(token, *image),
                None => self.wake_source(token),
            }
        }
    }

    fn begin_take_up(&mut self, token: u64, image: Image) {
        let Some(place) = self.places.get(&token).copied() else { return };
        let Some(service) = self.services.get_mut(&place.service) else { return };
        let Some(endpoint) = service.endpoints.get_mut(&place.endpoint) else { return };
        let Some(source) = endpoint.sources.get_mut(place.source) else { return };
        if image.tells_cached {
            endpoint.shared.usage.set_tells();
        }
        let believed = service.believed.clone();
        source.begin_take_up(image, believed.as_deref(), &mut endpoint.copies, &mut service.writer);
        if let Some(keeper) = &mut self.keeper {
            keeper.taking.insert(token);
        }
    }

    /// One slice; with the last one the source wakes.
    fn take_up(&mut self, token: u64) {
        let done = self.with_source(token, |source, copies, writer, _| {
            writer.pending() <= PENDING_MAX && source.take_up_slice(KEYS_PER_CYCLE, copies, writer)
        });
        // A source that is gone has nothing to take up.
        if done.unwrap_or(true) {
            if let Some(keeper) = &mut self.keeper {
                keeper.taking.remove(&token);
            }
            self.wake_source(token);
        }
    }

    /// One slice of the rank at hand; begins a round when one is due.
    fn write_next(&mut self) {
        let now = Instant::now();
        let Some(keeper) = &mut self.keeper else { return };
        if keeper.round.is_empty() && now >= keeper.due {
            keeper.due = now + keeper.period;
            let Keeper { files, shares, round, .. } = keeper;
            let is_due = |token: &u64, place: &Place| {
                let endpoint = self.services.get(&place.service)?.endpoints.get(&place.endpoint)?;
                let (source, share) = (endpoint.sources.get(place.source)?, shares.get(token)?);
                Some(source.has_changed() && files.writes(share) || !source.is_asleep() && files.misses(share))
            };
            let tokens = self.places.iter().filter(|(token, place)| is_due(token, place) == Some(true));
            round.extend(tokens.map(|(token, _)| *token));
        }
        let Some(token) = keeper.round.front().copied().filter(|_| !keeper.busy.load(Ordering::Acquire)) else {
            return;
        };
        let (files, busy) = (keeper.files.clone(), Arc::clone(&keeper.busy));
        let progress = match self.source(token) {
            Some((source, copies)) => source.capture(copies, KEYS_PER_CYCLE),
            None => Progress::GivenUp,
        };
        match progress {
            Progress::More => return,
            Progress::GivenUp => {
                if let Some((source, _)) = self.source(token) {
                    source.stats.state_failure();
                }
            }
            Progress::Done(groups) => {
                if let Some(write) = self.write_of(token, groups, &busy) {
                    busy.store(true, Ordering::Release);
                    if !files.write(write) {
                        busy.store(false, Ordering::Release);
                    }
                }
            }
        }
        if let Some(keeper) = &mut self.keeper {
            keeper.round.pop_front();
        }
    }

    fn write_of(&mut self, token: u64, groups: Captured, busy: &Arc<AtomicBool>) -> Option<Write> {
        let identity = self.identity(token)?;
        let place = self.places.get(&token)?;
        let endpoint = self.services.get_mut(&place.service)?.endpoints.get_mut(&place.endpoint)?;
        let tells_cached = endpoint.shared.usage.tells();
        let source = endpoint.sources.get_mut(place.source)?;
        // Of keys that cannot be read the file says nothing, in the place of what it said before.
        let (image, groups) = match source.image(&endpoint.copies, tells_cached) {
            Some(image) => (image, groups),
            None => (Image::default(), Captured::default()),
        };
        Some(Write { identity, image, groups, stats: Arc::clone(&source.stats), busy: Arc::clone(busy) })
    }

    /// Writes every rank that has changed, at the end.
    pub(super) fn write_all(&mut self) {
        // Nothing that is still read is waited for: the helper is told so by the end of its answers.
        // Nobody leaves a file now, or those that end later would write what others have written better.
        let Some(Keeper { files, shares, busy, .. }) = self.keeper.take() else { return };
        for (token, share) in shares {
            if !files.writes(&share) {
                continue;
            }
            let Some((source, _)) = self.source(token) else { continue };
            if !source.has_changed() {
                continue;
            }
            // One at a time: all of them at once would need as much memory again.
            let deadline = Instant::now() + WRITE_PATIENCE;
            while busy.load(Ordering::Acquire) {
                if Instant::now() > deadline {
                    return tracing::warn!(
                        "state files cannot be written in time: ranks are left as they were written last"
                    );
                }
                std::thread::sleep(TICK_KEEP);
            }
            let Some((source, copies)) = self.source(token) else { continue };
            let groups = source.capture_whole(copies);
            if let Some(write) = self.write_of(token, groups, &busy) {
                busy.store(true, Ordering::Release);
                files.write_at_last(write);
            }
        }
    }

    /// The files of an endpoint that leaves its rule are of no more use to it.
    pub(super) fn forget_files(&mut self, id: TableId, index: EndpointIndex) {
        self.leave_files(id, index, |files, share| files.forget(share));
    }

    /// The sources of an endpoint end; what their files say may be of use again.
    pub(super) fn leave_files(&mut self, id: TableId, index: EndpointIndex, leave: impl Fn(&Files, Share)) {
        let Some(Keeper { files, shares, .. }) = &mut self.keeper else { return };
        for (token, _) in self.places.iter().filter(|(_, place)| (place.service, place.endpoint) == (id, index)) {
            if let Some(share) = shares.remove(token) {
                leave(files, share);
            }
        }
    }

    /// Looks at what engines said of their caches.
    pub(super) fn check_usage(&mut self) {
        let now = Instant::now();
        if now.duration_since(self.usage_checked) < TICK_USAGE {
            return;
        }
        self.usage_checked = now;
        self.usage_wanted = false;
        for service in self.services.values_mut() {
            for endpoint in service.endpoints.values_mut() {
                self.usage_wanted |= endpoint.check_usage(&mut service.writer, &mut service.touched);
            }
        }
    }
}

impl Endpoint {
    /// Takes what its engine said; whether more is wanted. Of several ranks it is not known which answered.
    fn check_usage(&mut self, writer: &mut shards::inventory::Writer, touched: &mut bool) -> bool {
        let [source] = &mut self.sources[..] else {
            self.shared.usage.want(false);
            return false;
        };
        let wanted = source.wants_usage(&self.copies);
        self.shared.usage.want(wanted);
        while let Some(statement) = self.shared.usage.take() {
            if wanted {
                source.usage_said(&statement, &mut self.copies, writer);
                *touched = true;
            }
        }
        wanted
    }
}

impl super::Service {
    fn identity(&self, source: &Source) -> Identity {
        Identity {
            engine: self.engine.name().to_owned(),
            endpoint: source.name.label.clone(),
            source: match &source.from.mode {
                Mode::Connect(address) => address.clone(),
                Mode::Bind(address) => format!("bound {address}"),
            },
            rank: source.name.rank.0,
            block_tokens: self.block_tokens,
            contract: super::super::persist::digest(self.believed.as_deref()),
            media: u8::from(self.weights.cpu > 0) | u8::from(self.weights.storage > 0) << 1,
        }
    }
}
