//! A source before its sockets are opened: what a state file says of its rank is taken up, a slice at a time.

use std::sync::atomic::Ordering;

use shards::ids::BlockKey;
use shards::inventory::Writer;
use shards::usage::Statement;

use super::super::calibrate::{Believed, Way};
use super::super::copies::Copies;
use super::super::persist::{Captured, Image, Progress};
use super::super::status::{Replay, Started, add};
use super::super::stream::Stream;
use super::{Io, Source};

/// Why a source has no sockets yet.
pub(super) enum Asleep {
    /// Its state file is being read.
    Waiting,
    /// It is being taken up.
    TakingUp(Box<TakeUp>),
}

/// A file that is being taken up.
pub(super) struct TakeUp {
    image: Image,
    /// Own keys, groups, and keys of the group at hand that were taken already.
    own: usize,
    group: usize,
    key: usize,
}

/// What tells whether something has changed since a rank was written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Mark([u64; 4]);

impl Source {
    /// Waits for the rank's state file.
    pub(crate) fn sleep(&mut self) {
        self.asleep = Some(Asleep::Waiting);
    }

    /// Whether its sockets are still to be opened.
    pub(crate) fn is_asleep(&self) -> bool {
        self.asleep.is_some()
    }

    /// Begins to take up what a file says.
    pub(crate) fn begin_take_up(
        &mut self,
        image: Image,
        believed: Option<&Believed>,
        copies: &mut Copies,
        writer: &mut Writer,
    ) {
        // A way that the rule cannot have is one of a file whose contract has the same digest by chance.
        let way = image.way.way(believed).unwrap_or(Way::Rule);
        let place = self.place;
        let places: Vec<_> = image.groups.iter().map(|(place, _)| *place).collect();
        self.with_applier(copies, writer, |_, applier| {
            applier.change(|copies, _, _, op| copies.take_up(place, way, &places, &mut |each| op(each)));
        });
        self.asleep = Some(Asleep::TakingUp(Box::new(TakeUp { image, own: 0, group: 0, key: 0 })));
    }

    /// Takes up at most `most` keys; true once all are taken.
    pub(crate) fn take_up_slice(&mut self, most: usize, copies: &mut Copies, writer: &mut Writer) -> bool {
        let Some(Asleep::TakingUp(mut taking)) = self.asleep.take() else { return true };
        let place = self.place;
        let own = &taking.image.own[taking.own..];
        let own = &own[..own.len().min(most)];
        if !own.is_empty() {
            own.iter().for_each(|(engine, own)| copies.take_up_own(place, *engine, *own));
            taking.own += own.len();
            self.asleep = Some(Asleep::TakingUp(taking));
            return false;
        }
        if let Some((group, keys)) = taking.image.groups.get(taking.group) {
            let keys = &keys[taking.key..];
            let (slice, left) = keys.split_at(keys.len().min(most));
            self.with_applier(copies, writer, |_, applier| {
                applier.change(|copies, place, stats, op| {
                    for (key, count) in slice {
                        let taken =
                            copies.take_up_key(place, *group, (BlockKey(*key), *count), stats, &mut |each| op(each));
                        add(&stats.restored, u64::from(taken));
                    }
                });
            });
            taking.key += slice.len();
            if left.is_empty() {
                (taking.group, taking.key) = (taking.group + 1, 0);
            }
            self.asleep = Some(Asleep::TakingUp(taking));
            return false;
        }
        let Image { last, whole, unproven, .. } = taking.image;
        self.stream = Stream::resumed(self.from.replay.is_some(), last, whole, unproven);
        let blocks = self.stats.restored.load(Ordering::Relaxed);
        if last.is_some() || blocks > 0 {
            self.started = Some(Started::Restored);
            self.stats.next_seq.store(last.map_or(0, |(seq, _)| seq.saturating_add(1)), Ordering::Relaxed);
            tracing::info!(
                endpoint = self.name.label,
                rank = self.name.rank.0,
                blocks,
                last_seq = last.map(|(seq, _)| seq),
                "KV blocks taken up from the rank's state file"
            );
        }
        self.written = self.mark();
        true
    }

    /// Opens the sockets.
    pub(crate) fn wake(&mut self, io: &mut Io<'_>) {
        self.asleep = None;
        self.open_socket(io);
    }

    /// Whether something has changed since the rank was written.
    pub(crate) fn has_changed(&self) -> bool {
        self.asleep.is_none() && self.mark() != self.written
    }

    /// What a file is to say of the rank but for its groups, which were copied at this moment.
    pub(crate) fn image(&mut self, copies: &Copies, tells_cached: bool) -> Option<Image> {
        self.written = self.mark();
        let way = copies.kept_way(self.place)?;
        let (last, whole) = (self.stream.last(), self.stream.is_whole());
        let own = copies.own_pairs(self.place);
        let unproven = copies.is_unproven(self.place);
        Some(Image { way, last, whole, tells_cached, unproven, groups: Vec::new(), own })
    }

    /// Copies the rank's keys, a slice at a time.
    pub(crate) fn capture(&self, copies: &mut Copies, most: usize) -> Progress {
        copies.capture(self.place, most)
    }

    /// Copies the rank's keys at once.
    pub(crate) fn capture_whole(&self, copies: &mut Copies) -> Captured {
        copies.capture_whole(self.place)
    }

    fn mark(&self) -> Mark {
        let stats = &self.stats;
        Mark([&stats.batches, &stats.clears, &stats.adopted, &stats.withdrawn].map(|n| n.load(Ordering::Relaxed)))
    }

    /// Whether the engine's `usage` can tell something of the rank that its events did not.
    pub(crate) fn wants_usage(&self, copies: &Copies) -> bool {
        self.stream.is_connected() && (!self.stream.is_whole() || copies.is_unproven(self.place))
    }

    /// Takes or gives up what the engine's `usage` says of a prompt's blocks.
    pub(crate) fn usage_said(&mut self, statement: &Statement, copies: &mut Copies, writer: &mut Writer) {
        let (cached, rest) = statement.keys.split_at(statement.keys.len().min(statement.cached as usize));
        let denied = if statement.denied { rest } else { &[] };
        self.with_applier(copies, writer, |_, applier| {
            applier.change(|copies, place, stats, op| {
                copies.usage_said(place, cached, denied, stats, &mut |each| op(each));
            });
        });
        self.note(copies);
    }

    /// Decides, once the connection has shown it, what the rank began with, and says so where that is nothing.
    pub(super) fn note_start(&mut self) {
        if self.started.is_some() || !self.stream.is_connected() || self.replay.is_some() {
            return;
        }
        let replays = self.stream.tally().replays;
        let replayed = replays > self.replays_before;
        self.started = Some(if replayed { Started::Replayed } else { Started::Cold });
        let without = self.stats.replay.load(Ordering::Relaxed) != Replay::Works as u32;
        if !replayed && without && !self.stream.is_whole() {
            tracing::info!(
                endpoint = self.name.label,
                rank = self.name.rank.0,
                address = self.from.replay,
                "no replay endpoint: cold start; what the engine announced before is not known"
            );
        }
    }
}
