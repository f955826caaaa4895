//! What engines are about to store, because a request is on its way to them: shared by all shards, for seconds.
//!
//! A cold prompt that comes ten times in one instant would go to ten endpoints, and be computed ten times, since no engine
//! has told of it yet. So whoever dispatches a prompt leaves a **claim**: that beginning of it will be held there. Claims
//! decide where further requests are placed; they are no hits and no part of any inventory.
//!
//! **Marks.** A claim is left at some beginnings of the prompt, so that another prompt that shares a part of it finds the
//! largest mark below that part: after 1, 2, 3, 4, 6, 8, 12 … blocks, counted from the start and from the first block
//! that the endpoint has not got, and after all blocks that were keyed. A cold prompt is keyed no further than its first
//! slice: what lies behind that is claimed by the hash of the request's body, for requests that are equal.
//!
//! **Until when.** A claim ends after some seconds, and no later claim of the same beginning at the same endpoint puts its end
//! off: by then the engine's events have shown what became of it. Blocks that are held are claimed in vain. When
//! the endpoint's caches are emptied or the endpoint goes down its claims are void, by its [epoch](Holder::epoch).
//!
//! **Invariant.** A claim is one word, written and read whole, and means the same whoever wrote it: no order of accesses
//! can make up a claim that nobody made. Claims get lost when a set is full or two shards write at once; a hash
//! mistaken for another places a request badly (one in a million).
//!
//! ```text
//! 63        44 43              28 27      20 19      12 11            0
//! | hash      | endpoint         | rank     | epoch    | end, in 1/16 s |
//! ```

#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::ids::{BlockKey, EndpointIndex, Rank, ServiceId};

/// Sets of claims: 1 MB in all. A dispatch leaves about 2 · log₂(blocks) claims.
const SETS: usize = 1 << 13;
/// Claims of a set; one more takes the place of the one that ends first. More endpoints than this are not claimed for one
/// beginning.
const WAYS: usize = 16;

/// The longest time that a claim can be given.
pub const CLAIM_MAX: Duration = Duration::from_secs(60);

const TICKS_PER_SECOND: u128 = 16;
const END_BITS: u32 = 12;
const END_MASK: u64 = (1 << END_BITS) - 1;
const HASH_SHIFT: u32 = 44;
/// In the place of a rank; there are far fewer.
const NO_RANK: u8 = u8::MAX;

/// A cache that claims are about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holder {
    /// Its endpoint.
    pub endpoint: EndpointIndex,
    /// Its rank; none where the engine chooses.
    pub rank: Option<Rank>,
    /// Changes when the endpoint's caches are emptied or it goes down; of it the lowest 8 bits count.
    pub epoch: u32,
}

/// A prompt as claims see it.
#[derive(Clone, Copy, Debug)]
pub struct Claimable<'a> {
    /// Its service: equal keys of two services are two things.
    pub service: ServiceId,
    /// Keys of its blocks, as far as they were made.
    pub keys: &'a [BlockKey],
    /// Tokens per block.
    pub block_tokens: u32,
    /// Where keys were not made to the end: the hash of the whole request, and the tokens of the prompt.
    pub whole: Option<(u64, u64)>,
}

/// The claims of all shards.
#[derive(Debug)]
pub struct Claims {
    sets: Box<[Set]>,
    began: Instant,
}

#[derive(Debug)]
#[repr(align(128))]
struct Set([AtomicU64; WAYS]);

/// A claim as it stands in its set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Claim(u64);

impl Claim {
    const NONE: Claim = Claim(0);

    fn new(hash: u64, holder: Holder, end: u64) -> Self {
        let Holder { endpoint, rank, epoch } = holder;
        let of = u64::from(endpoint.0) << 28
            | u64::from(rank.map_or(NO_RANK, |rank| rank.0)) << 20
            | u64::from(epoch as u8) << 12;
        Claim(hash >> HASH_SHIFT << HASH_SHIFT | of | end & END_MASK)
    }

    fn is_of(self, hash: u64) -> bool {
        (self.0 ^ hash) >> HASH_SHIFT == 0 && self != Claim::NONE
    }

    fn holder(self) -> Holder {
        let rank = (self.0 >> 20) as u8;
        Holder {
            endpoint: EndpointIndex((self.0 >> 28) as u16),
            rank: (rank != NO_RANK).then_some(Rank(rank)),
            epoch: u32::from((self.0 >> 12) as u8),
        }
    }

    /// Whether the claim, which was made for no longer than so many ticks, has not ended. One whose end has gone round
    /// since (4 minutes) and that nobody has overwritten may be taken for a fresh one, for as long as it was made for.
    fn is_fresh(self, now: u64, ticks: u64) -> bool {
        (1..=ticks).contains(&(self.0.wrapping_sub(now) & END_MASK))
    }
}

impl Default for Claims {
    fn default() -> Self {
        Claims::new()
    }
}

impl Claims {
    /// No claims.
    #[must_use]
    pub fn new() -> Self {
        let set = || Set(std::array::from_fn(|_| AtomicU64::new(Claim::NONE.0)));
        Claims { sets: (0..SETS).map(|_| set()).collect(), began: Instant::now() }
    }

    fn ticks(&self, now: Instant) -> u64 {
        (now.saturating_duration_since(self.began).as_nanos() * TICKS_PER_SECOND / 1_000_000_000) as u64
    }

    /// The endpoint is about to hold the prompt, of which it holds so many blocks now, for so long.
    pub fn claim(&self, prompt: &Claimable<'_>, held: usize, holder: Holder, now: Instant, period: Duration) {
        let (now, ticks) = (self.ticks(now), ticks_of(period));
        if ticks == 0 {
            return;
        }
        let claim = |hash| self.put(hash, holder, now, ticks);
        marks(0, prompt.keys.len()).filter(|mark| *mark > held).for_each(|mark| claim(prompt.hash_at(mark)));
        if held > 0 {
            marks(held, prompt.keys.len()).for_each(|mark| claim(prompt.hash_at(mark)));
        }
        if let Some((hash, _)) = prompt.whole {
            claim(prompt.whole_hash(hash));
        }
    }

    fn put(&self, hash: u64, holder: Holder, now: u64, ticks: u64) {
        let set = &self.set(hash).0;
        let new = Claim::new(hash, holder, now + ticks + 1);
        let mut place = (0, u64::MAX);
        for (at, word) in set.iter().enumerate() {
            let old = Claim(word.load(Ordering::Relaxed));
            let fresh = old != Claim::NONE && old.is_fresh(now, ticks + 1);
            if fresh && old.is_of(hash) && old.holder() == new.holder() {
                return;
            }
            let left = if fresh { old.0.wrapping_sub(now) & END_MASK } else { 0 };
            if left < place.1 {
                place = (at, left);
            }
        }
        set[place.0].store(new.0, Ordering::Relaxed);
    }

    /// Calls `each` with the holders that are about to have a beginning of the prompt, and its tokens: of a holder several
    /// times, at last with the most. `held` is the longest run that somebody has; `period` how long claims are made for.
    pub fn find(
        &self,
        prompt: &Claimable<'_>,
        held: usize,
        now: Instant,
        period: Duration,
        mut each: impl FnMut(Holder, u64),
    ) {
        let (now, ticks) = (self.ticks(now), ticks_of(period));
        if ticks == 0 {
            return;
        }
        let mut look = |hash: u64, tokens: u64| {
            for word in &self.set(hash).0 {
                let claim = Claim(word.load(Ordering::Relaxed));
                if claim.is_of(hash) && claim.is_fresh(now, ticks + 1) {
                    each(claim.holder(), tokens);
                }
            }
        };
        let tokens = |blocks: usize| blocks as u64 * u64::from(prompt.block_tokens);
        let mut from_start = marks(0, prompt.keys.len()).peekable();
        let mut from_held = marks(held, if held > 0 { prompt.keys.len() } else { 0 }).peekable();
        while let Some(mark) = from_start.peek().into_iter().chain(from_held.peek()).min().copied() {
            from_start.next_if_eq(&mark);
            from_held.next_if_eq(&mark);
            look(prompt.hash_at(mark), tokens(mark));
        }
        if let Some((hash, tokens)) = prompt.whole {
            look(prompt.whole_hash(hash), tokens);
        }
    }

    fn set(&self, hash: u64) -> &Set {
        &self.sets[hash as usize % SETS]
    }
}

impl Claimable<'_> {
    fn hash_at(&self, blocks: usize) -> u64 {
        mix(self.keys[blocks - 1].0, u64::from(self.service.0))
    }

    fn whole_hash(&self, hash: u64) -> u64 {
        mix(hash, !u64::from(self.service.0))
    }
}

fn ticks_of(period: Duration) -> u64 {
    (period.min(CLAIM_MAX).as_nanos() * TICKS_PER_SECOND).div_ceil(1_000_000_000) as u64
}

fn mix(value: u64, salt: u64) -> u64 {
    let product = u128::from(value ^ 0x9e37_79b9_7f4a_7c15) * u128::from(salt.wrapping_mul(2) ^ 0xd1b5_4a32_d192_ed03);
    (product as u64) ^ (product >> 64) as u64
}

/// Numbers of blocks at which a claim is left on the way from one number to another: 1, 2, 3, 4, 6, 8, 12 … beyond the
/// first, and the last.
fn marks(from: usize, to: usize) -> impl Iterator<Item = usize> {
    let steps = (0..).map(|number: u32| match number {
        0 => 1,
        number if number % 2 == 1 => 1 << number.div_ceil(2),
        number => 3 << (number / 2 - 1),
    });
    let between = steps.map(move |step: usize| from + step).take_while(move |mark| *mark < to);
    between.chain((to > from).then_some(to))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    const PERIOD: Duration = Duration::from_secs(2);

    fn keys(prompt: u64, blocks: u64) -> Vec<BlockKey> {
        (0..blocks).map(|block| BlockKey((prompt << 32 | block).wrapping_mul(0x9e37_79b9_7f4a_7c15))).collect()
    }

    fn prompt(keys: &[BlockKey]) -> Claimable<'_> {
        Claimable { service: ServiceId(3), keys, block_tokens: 16, whole: None }
    }

    fn holder(endpoint: u16) -> Holder {
        let rank = (endpoint % 2 == 1).then_some(Rank(1));
        Holder { endpoint: EndpointIndex(endpoint), rank, epoch: 7 }
    }

    /// Most tokens by endpoint.
    fn found(claims: &Claims, prompt: &Claimable<'_>, held: usize, now: Instant) -> BTreeMap<u16, u64> {
        let mut found = BTreeMap::new();
        claims.find(prompt, held, now, PERIOD, |of, tokens| {
            assert_eq!(of, holder(of.endpoint.0));
            assert!(found.insert(of.endpoint.0, tokens).is_none_or(|before| before <= tokens));
        });
        found
    }

    #[test]
    fn marks_stand_two_to_a_doubling_and_at_the_end() {
        assert_eq!(marks(0, 100).collect::<Vec<_>>(), [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 100]);
        assert_eq!(marks(100, 105).collect::<Vec<_>>(), [101, 102, 103, 104, 105]);
        assert_eq!(marks(5, 5).count(), 0);
    }

    #[test]
    fn an_equal_prompt_finds_all_of_it_and_one_that_shares_its_beginning_finds_most_of_that() {
        let (claims, now) = (Claims::new(), Instant::now());
        let own = keys(1, 88);
        claims.claim(&prompt(&own), 0, holder(5), now, PERIOD);
        assert_eq!(found(&claims, &prompt(&own), 0, now), BTreeMap::from([(5, 88 * 16)]));
        // 30 blocks in common: the largest mark below is 24.
        let shared = [&own[..30], &keys(2, 60)[..]].concat();
        assert_eq!(found(&claims, &prompt(&shared), 0, now), BTreeMap::from([(5, 24 * 16)]));
        assert_eq!(found(&claims, &prompt(&own[..50]), 0, now), BTreeMap::from([(5, 48 * 16)]));
        assert_eq!(found(&claims, &prompt(&keys(2, 88)), 0, now), BTreeMap::new());
        let elsewhere = Claimable { service: ServiceId(4), ..prompt(&own) };
        assert_eq!(found(&claims, &elsewhere, 0, now), BTreeMap::new());
    }

    #[test]
    fn a_grown_conversation_finds_what_was_claimed_beyond_what_is_held() {
        let (claims, now) = (Claims::new(), Instant::now());
        let own = keys(1, 120);
        claims.claim(&prompt(&own[..105]), 100, holder(2), now, PERIOD);
        assert_eq!(found(&claims, &prompt(&own), 100, now), BTreeMap::from([(2, 104 * 16)]));
        assert_eq!(found(&claims, &prompt(&own[..105]), 100, now), BTreeMap::from([(2, 105 * 16)]));
        // What was held already is not claimed.
        assert_eq!(found(&claims, &prompt(&own[..100]), 100, now), BTreeMap::new());
    }

    #[test]
    fn a_prompt_that_was_not_keyed_to_its_end_is_claimed_by_its_request() {
        let (claims, now) = (Claims::new(), Instant::now());
        let own = keys(1, 64);
        let long = Claimable { whole: Some((0xfeed, 50_000)), ..prompt(&own) };
        claims.claim(&long, 0, holder(1), now, PERIOD);
        assert_eq!(found(&claims, &long, 0, now), BTreeMap::from([(1, 50_000)]));
        let other = Claimable { whole: Some((0xbeef, 50_000)), ..long };
        assert_eq!(found(&claims, &other, 0, now), BTreeMap::from([(1, 64 * 16)]));
    }

    #[test]
    fn a_claim_ends_and_is_not_put_off_by_another() {
        let (claims, now) = (Claims::new(), Instant::now());
        let own = keys(1, 10);
        claims.claim(&prompt(&own), 0, holder(0), now, PERIOD);
        let later = now + Duration::from_millis(1_500);
        claims.claim(&prompt(&own), 0, holder(0), later, PERIOD);
        claims.claim(&prompt(&own), 0, holder(9), later, PERIOD);
        assert_eq!(found(&claims, &prompt(&own), 0, later), BTreeMap::from([(0, 160), (9, 160)]));
        // Up to two sixteenths of a second late.
        let ended = now + Duration::from_millis(2_130);
        assert_eq!(found(&claims, &prompt(&own), 0, ended), BTreeMap::from([(9, 160)]));
        assert_eq!(found(&claims, &prompt(&own), 0, now + Duration::from_secs(4)), BTreeMap::new());
        claims.claim(&prompt(&own), 0, holder(0), now, Duration::ZERO);
        assert_eq!(found(&claims, &prompt(&keys(1, 10)), 0, now + Duration::from_secs(4)), BTreeMap::new());
    }

    #[test]
    fn a_full_set_gives_up_the_claim_that_ends_first() {
        let (claims, now) = (Claims::new(), Instant::now());
        let own = keys(1, 1);
        for endpoint in 0..WAYS as u16 + 4 {
            let at = now + Duration::from_millis(u64::from(endpoint) * 63);
            claims.claim(&prompt(&own), 0, holder(endpoint), at, PERIOD);
        }
        let at = now + Duration::from_millis(1_300);
        let endpoints: Vec<u16> = found(&claims, &prompt(&own), 0, at).into_keys().collect();
        assert_eq!(endpoints, (4..WAYS as u16 + 4).collect::<Vec<_>>());
    }

    #[test]
    fn words_of_several_threads_are_claims_that_one_of_them_made() {
        let claims = Claims::new();
        let now = Instant::now();
        let own = keys(1, 40);
        std::thread::scope(|scope| {
            for endpoint in 0..4 {
                let (claims, own) = (&claims, &own);
                scope.spawn(move || {
                    for round in 0..2_000 {
                        claims.claim(&prompt(&own[..1 + round % 40]), 0, holder(endpoint), now, PERIOD);
                        for (endpoint, tokens) in found(claims, &prompt(own), 0, now) {
                            assert!(endpoint < 4 && tokens <= 640);
                        }
                    }
                });
            }
        });
        let endpoints: Vec<u16> = found(&claims, &prompt(&own), 0, now).into_keys().collect();
        assert_eq!(endpoints, [0, 1, 2, 3]);
    }
}
