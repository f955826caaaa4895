//! A small deterministic random source (SplitMix64): the same on every machine and release, which a dependency's
//! default generator does not promise.

/// Random numbers from a seed.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// The source of this seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Random(seed)
    }

    /// The source for one item of a kind: neighbours of the same seed are unrelated.
    #[must_use]
    pub fn of(seed: u64, kind: u64, item: u64) -> Self {
        let mut random = Random(seed ^ kind.wrapping_mul(0xA24B_AED4_963E_E407));
        random.0 = random.next_u64() ^ item.wrapping_mul(0x9FB2_1C65_1E98_DF25);
        random.next_u64();
        random
    }

    /// 64 random bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        bits ^ (bits >> 31)
    }

    /// A number below `bound`, which is not 0.
    pub fn below(&mut self, bound: usize) -> usize {
        debug_assert!(bound > 0, "nothing is below 0");
        // The high half of a product: fast, and the bias of less than 2^-32 does not matter here.
        ((u128::from(self.next_u64()) * bound as u128) >> 64) as usize
    }

    /// A number from 0 to below 1.
    pub fn unit(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Puts the items in random order.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last + 1));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_seed_gives_the_same_numbers_and_neighbours_differ() {
        let numbers = |kind, item| {
            let mut random = Random::of(7, kind, item);
            (0..4).map(|_| random.next_u64()).collect::<Vec<_>>()
        };
        assert_eq!(numbers(1, 1), numbers(1, 1));
        assert_ne!(numbers(1, 1), numbers(1, 2));
        assert_ne!(numbers(1, 1), numbers(2, 1));
    }

    #[test]
    fn bounds_hold_and_everything_below_them_comes() {
        let mut random = Random::new(1);
        let mut seen = [0; 10];
        for _ in 0..10_000 {
            seen[random.below(10)] += 1;
            assert!((0.0..1.0).contains(&random.unit()));
        }
        assert!(seen.iter().all(|&count| count > 800), "{seen:?}");
        let mut items: Vec<usize> = (0..100).collect();
        random.shuffle(&mut items);
        assert_ne!(items, (0..100).collect::<Vec<_>>());
        items.sort_unstable();
        assert_eq!(items, (0..100).collect::<Vec<_>>());
    }
}
