//! A seed compared without being told.
//!
//! Two gateways of a pair must have the same seed; neither shows it to who asks. The asker gives a nonce of its own, and
//! each seals its seed with it: seals are equal where seeds are, and of no use for another nonce.

use sha2::{Digest as _, Sha256};

/// Bytes of a nonce.
pub const NONCE_BYTES: usize = 32;

/// What is asked with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Nonce([u8; NONCE_BYTES]);

impl Nonce {
    /// A nonce that nobody can foresee.
    ///
    /// # Errors
    /// The system has no random numbers to give.
    pub fn draw() -> std::io::Result<Self> {
        let mut bytes = [0; NONCE_BYTES];
        std::io::Read::read_exact(&mut std::fs::File::open("/dev/urandom")?, &mut bytes)?;
        Ok(Nonce(bytes))
    }

    /// Reads the form of [`Nonce::to_hex`]; none where it is another.
    #[must_use]
    pub fn from_hex(text: &str) -> Option<Self> {
        let mut bytes = [0; NONCE_BYTES];
        if text.len() != 2 * NONCE_BYTES {
            return None;
        }
        for (place, byte) in bytes.iter_mut().enumerate() {
            *byte = u8::from_str_radix(text.get(2 * place..2 * place + 2)?, 16).ok()?;
        }
        Some(Nonce(bytes))
    }

    /// As it is sent.
    #[must_use]
    pub fn to_hex(self) -> String {
        self.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Seals a seed: SHA-256 over a label, the nonce and the seed, in hex.
    #[must_use]
    pub fn seal(self, seed: &str) -> String {
        let mut hash = Sha256::new();
        hash.update(b"kvlane seed v1\0");
        hash.update(self.0);
        hash.update(seed);
        hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seals_are_equal_where_seed_and_nonce_are() {
        let (one, other) = (Nonce([1; NONCE_BYTES]), Nonce([2; NONCE_BYTES]));
        assert_eq!(one.seal("42"), one.seal("42"));
        assert_ne!(one.seal("42"), one.seal("43"));
        assert_ne!(one.seal("42"), other.seal("42"));
        assert_eq!(Nonce::from_hex(&one.to_hex()), Some(one));
        for wrong in ["", "01", &"0".repeat(63), &"g".repeat(64), &"é".repeat(32)] {
            assert_eq!(Nonce::from_hex(wrong), None, "{wrong:?}");
        }
        assert_ne!(Nonce::draw().expect("random numbers"), Nonce::draw().expect("random numbers"));
    }
}
