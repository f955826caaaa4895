//! Where sessions were sent before (Tier 0, and selections that keep a session where it is).
//!
//! **Invariant.** One thread writes the table ([`AffinityWriter`], on the control core); every shard reads it without a
//! lock. A pin holds at once on the shard that made it, which keeps it beside the table, and on the others from the next
//! [`AffinityWriter::apply`] on. Of two pins of one session the one that was used last holds. Everything is bounded, and
//! whatever a bound drops costs a session its place, never an answer.
//!
//! Sessions are told apart by 64 bits of a hash over their service and id: two that share them share an endpoint.

#![forbid(unsafe_code)]

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use crossbeam::queue::ArrayQueue;
use evmap::handles::{ReadHandle, WriteHandle};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::ids::{EndpointIndex, ServiceId};
use crate::route::Pin;

/// Longest id of a session, bytes. A request with a longer one has none.
pub const ID_BYTES_MAX: usize = 127;
/// Pins that wait for the writer. A further one holds on its own shard only.
const WAITING_MAX: usize = 16_384;
/// Pins that a shard keeps beside the table. Beyond it the oldest go; by then they are in the table.
const OWN_MAX: usize = 4_096;
/// A pin that is used again is written again once so many parts of its time have passed, not for every request.
const RENEW_PARTS: u32 = 16;
/// No decode endpoint, in a packed pin.
const NO_DECODE: u16 = u16::MAX;

/// Seconds on the clock of sessions, of nanoseconds on that of the process.
#[must_use]
pub fn seconds(now_ns: u64) -> u32 {
    u32::try_from(now_ns / 1_000_000_000).unwrap_or(u32::MAX)
}

/// The key of a session; none where the id is empty or too long.
#[must_use]
pub fn session_key(service: ServiceId, id: &[u8]) -> Option<u64> {
    (1..=ID_BYTES_MAX).contains(&id.len()).then(|| xxh3_64_with_seed(id, u64::from(service.0)))
}

/// A pin and the second at which it ends, in one word: the map compares and copies values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Packed(u64);

impl Packed {
    fn new(pin: Pin, ends_s: u32) -> Self {
        let decode = pin.decode.map_or(NO_DECODE, |decode| decode.0);
        Packed(u64::from(ends_s) << 32 | u64::from(decode) << 16 | u64::from(pin.prefill.0))
    }

    fn pin(self) -> Pin {
        let decode = (self.0 >> 16) as u16;
        let decode = (decode != NO_DECODE).then_some(EndpointIndex(decode));
        Pin { prefill: EndpointIndex(self.0 as u16), decode }
    }

    fn ends_s(self) -> u32 {
        (self.0 >> 32) as u32
    }
}

/// The table, as everyone but its writer knows it.
#[derive(Debug)]
pub struct Affinity {
    /// Copied once for each shard.
    published: Mutex<ReadHandle<u64, u64>>,
    waiting: ArrayQueue<Update>,
    /// Sessions in the table.
    sessions: AtomicU64,
    /// Pins that the full queue kept from the other shards.
    pub dropped: AtomicU64,
    /// Sessions that a bound dropped before their time.
    pub evicted: AtomicU64,
}

#[derive(Clone, Copy, Debug)]
struct Update {
    service: ServiceId,
    key: u64,
    pin: Packed,
    /// Sessions that the service may have.
    max: u32,
}

impl Affinity {
    /// An empty table, and its writing end.
    #[must_use]
    pub fn new() -> (Arc<Affinity>, AffinityWriter) {
        let (mut map, reader) = evmap::new();
        map.publish();
        let affinity = Arc::new(Affinity {
            published: Mutex::new(reader),
            waiting: ArrayQueue::new(WAITING_MAX),
            sessions: AtomicU64::new(0),
            dropped: AtomicU64::new(0),
            evicted: AtomicU64::new(0),
        });
        (Arc::clone(&affinity), AffinityWriter { affinity, map, services: HashMap::new() })
    }

    /// Sessions in the table.
    #[must_use]
    pub fn sessions(&self) -> u64 {
        self.sessions.load(Ordering::Relaxed)
    }
}

/// The one writer.
#[derive(Debug)]
pub struct AffinityWriter {
    affinity: Arc<Affinity>,
    map: WriteHandle<u64, u64>,
    services: HashMap<ServiceId, Ages>,
}

/// The sessions of one service, by when they end.
#[derive(Debug, Default)]
struct Ages {
    ends: HashMap<u64, u32>,
    order: BTreeSet<(u32, u64)>,
}

impl Ages {
    /// Forgets the session that ends first.
    fn pop(&mut self) -> Option<u64> {
        let (_, key) = self.order.pop_first()?;
        self.ends.remove(&key);
        Some(key)
    }
}

impl AffinityWriter {
    /// Takes in what shards have pinned, forgets what has ended by `now_s` or is beyond its service's bound, and shows
    /// the rest to all shards. Waits for readers to leave the old table, a moment each.
    pub fn apply(&mut self, now_s: u32) {
        let mut changed = false;
        // As many as there can be at once: shards that go on pinning are heard the next time.
        for _ in 0..WAITING_MAX {
            let Some(update) = self.affinity.waiting.pop() else { break };
            changed |= self.take_in(update);
        }
        for ages in self.services.values_mut() {
            while ages.order.first().is_some_and(|(ends_s, _)| *ends_s <= now_s) {
                let Some(key) = ages.pop() else { break };
                self.map.remove_entry(key);
                changed = true;
            }
        }
        if changed {
            self.services.retain(|_, ages| !ages.order.is_empty());
            self.map.publish();
            let sessions = self.services.values().map(|ages| ages.order.len() as u64).sum();
            self.affinity.sessions.store(sessions, Ordering::Relaxed);
        }
    }

    fn take_in(&mut self, update: Update) -> bool {
        let Update { service, key, pin, max } = update;
        let ages = self.services.entry(service).or_default();
        match ages.ends.get(&key) {
            Some(ends_s) if *ends_s > pin.ends_s() => return false,
            Some(ends_s) => drop(ages.order.remove(&(*ends_s, key))),
            None => {}
        }
        ages.ends.insert(key, pin.ends_s());
        ages.order.insert((pin.ends_s(), key));
        self.map.update(key, pin.0);
        while ages.order.len() > max.max(1) as usize {
            let Some(oldest) = ages.pop() else { break };
            self.map.remove_entry(oldest);
            self.affinity.evicted.fetch_add(1, Ordering::Relaxed);
        }
        true
    }
}

/// One shard's end of the table, with the pins that it made itself.
#[derive(Debug)]
pub struct LocalAffinity {
    affinity: Arc<Affinity>,
    published: ReadHandle<u64, u64>,
    own: HashMap<u64, Packed>,
    /// Keys of `own`, oldest first.
    order: VecDeque<u64>,
}

/// What a session's pin is made with.
#[derive(Clone, Copy, Debug)]
pub struct PinTerms {
    /// Whose session it is.
    pub service: ServiceId,
    /// How long it holds after its last use; less than a second is a second.
    pub ttl: Duration,
    /// Sessions that the service may have.
    pub max: u32,
    /// The time in seconds, on the clock that [`AffinityWriter::apply`] is given.
    pub now_s: u32,
}

impl LocalAffinity {
    /// A shard's end.
    #[must_use]
    pub fn new(affinity: &Arc<Affinity>) -> Self {
        let published = affinity.published.lock().unwrap_or_else(PoisonError::into_inner).clone();
        LocalAffinity { affinity: Arc::clone(affinity), published, own: HashMap::new(), order: VecDeque::new() }
    }

    /// Where the session is pinned.
    #[must_use]
    pub fn get(&self, key: u64, now_s: u32) -> Option<Pin> {
        self.find(key).filter(|pin| pin.ends_s() > now_s).map(Packed::pin)
    }

    fn find(&self, key: u64) -> Option<Packed> {
        let published = self.published.get_one(&key).map(|pin| Packed(*pin));
        let own = self.own.get(&key).copied();
        // On a tie the own one: what others knew when it was made is older.
        published.into_iter().chain(own).max_by_key(|pin| pin.ends_s())
    }

    /// Pins the session, or goes on with its pin.
    pub fn put(&mut self, key: u64, pin: Pin, terms: PinTerms) {
        let ttl_s = u32::try_from(terms.ttl.as_secs()).unwrap_or(u32::MAX).max(1);
        let new = Packed::new(pin, terms.now_s.saturating_add(ttl_s));
        if let Some(known) = self.find(key)
            && known.pin() == pin
            && known.ends_s() > terms.now_s
            && new.ends_s().saturating_sub(known.ends_s()) < (ttl_s / RENEW_PARTS).max(1)
        {
            return;
        }
        if self.own.insert(key, new).is_none() {
            self.order.push_back(key);
            if self.order.len() > OWN_MAX
                && let Some(oldest) = self.order.pop_front()
            {
                self.own.remove(&oldest);
            }
        }
        let update = Update { service: terms.service, key, pin: new, max: terms.max };
        if self.affinity.waiting.push(update).is_err() {
            self.affinity.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TERMS: PinTerms = PinTerms { service: ServiceId(1), ttl: Duration::from_secs(32), max: 100, now_s: 10 };

    fn pin(prefill: u16, decode: Option<u16>) -> Pin {
        Pin { prefill: EndpointIndex(prefill), decode: decode.map(EndpointIndex) }
    }

    fn key(id: &str) -> u64 {
        session_key(ServiceId(1), id.as_bytes()).expect("a good id")
    }

    #[test]
    fn a_pin_holds_at_once_on_its_shard_and_on_the_others_once_it_is_written() {
        let (affinity, mut writer) = Affinity::new();
        let (mut one, other) = (LocalAffinity::new(&affinity), LocalAffinity::new(&affinity));
        one.put(key("a"), pin(3, Some(5)), TERMS);
        assert_eq!(one.get(key("a"), 10), Some(pin(3, Some(5))));
        assert_eq!(other.get(key("a"), 10), None);
        writer.apply(10);
        assert_eq!((other.get(key("a"), 10), affinity.sessions()), (Some(pin(3, Some(5))), 1));
        assert_eq!(one.get(key("b"), 10), None);
        let own_rule = session_key(ServiceId(2), b"a").expect("a good id");
        assert_eq!(one.get(own_rule, 10), None, "another rule's session of the same name");
    }

    #[test]
    fn a_pin_ends_unless_it_is_used_again_and_moves_with_its_session() {
        let (affinity, mut writer) = Affinity::new();
        let mut shards = [LocalAffinity::new(&affinity), LocalAffinity::new(&affinity)];
        shards[0].put(key("a"), pin(3, None), TERMS);
        writer.apply(10);
        shards[1].put(key("a"), pin(3, None), PinTerms { now_s: 30, ..TERMS });
        writer.apply(30);
        for shard in &shards {
            assert_eq!((shard.get(key("a"), 61), shard.get(key("a"), 62)), (Some(pin(3, None)), None));
        }
        shards[1].put(key("a"), pin(4, None), PinTerms { now_s: 31, ..TERMS });
        writer.apply(31);
        for shard in &shards {
            assert_eq!(shard.get(key("a"), 62), Some(pin(4, None)), "the last one holds, also beside an own one");
        }
        writer.apply(63);
        assert_eq!((affinity.sessions(), shards[0].get(key("a"), 40)), (0, Some(pin(3, None))));
        assert_eq!(shards[0].get(key("a"), 63), None);
    }

    #[test]
    fn beyond_the_bound_the_session_that_was_not_used_for_longest_is_forgotten() {
        let (affinity, mut writer) = Affinity::new();
        let mut shard = LocalAffinity::new(&affinity);
        for (now_s, id) in [(10, "a"), (11, "b"), (12, "c"), (20, "a"), (21, "d")] {
            shard.put(key(id), pin(1, None), PinTerms { now_s, max: 3, ..TERMS });
        }
        writer.apply(21);
        let other = LocalAffinity::new(&affinity);
        let held = ["a", "b", "c", "d"].map(|id| other.get(key(id), 21).is_some());
        assert_eq!((held, affinity.evicted.load(Ordering::Relaxed)), ([true, false, true, true], 1));
    }

    #[test]
    fn a_pin_in_use_is_not_written_for_every_request() {
        let (affinity, mut writer) = Affinity::new();
        let mut shard = LocalAffinity::new(&affinity);
        for _ in 0..100 {
            shard.put(key("a"), pin(1, None), TERMS);
        }
        assert_eq!(affinity.waiting.len(), 1);
        writer.apply(10);
        shard.put(key("a"), pin(1, None), PinTerms { now_s: 12, ..TERMS });
        assert_eq!(affinity.waiting.len(), 1, "two of 32 seconds have passed");
    }

    #[test]
    fn what_the_queue_and_the_shard_have_no_room_for_is_dropped_and_counted() {
        let (affinity, mut writer) = Affinity::new();
        let mut shard = LocalAffinity::new(&affinity);
        let all = WAITING_MAX + 10;
        (0..all).for_each(|id| shard.put(key(&id.to_string()), pin(1, None), PinTerms { max: u32::MAX, ..TERMS }));
        assert_eq!((affinity.dropped.load(Ordering::Relaxed), shard.own.len()), (10, OWN_MAX));
        writer.apply(10);
        assert_eq!(affinity.sessions(), WAITING_MAX as u64);
        assert_eq!(shard.get(key(&(all - 1).to_string()), 10), Some(pin(1, None)), "it holds where it was made");
    }

    #[test]
    fn ids_have_a_length() {
        let of = |length: usize| session_key(ServiceId(1), "x".repeat(length).as_bytes());
        assert!(of(0).is_none() && of(1).is_some() && of(ID_BYTES_MAX).is_some() && of(ID_BYTES_MAX + 1).is_none());
    }
}
