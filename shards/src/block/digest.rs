//! Whole digests, of the two functions that engines use.
//!
//! **Invariant.** Bytes past the function's own length are zero, so that equality of the array is equality of digests.

use sha2::{Digest as _, Sha256};
use xxhash_rust::xxh3::{Xxh3, xxh3_128};

/// A digest function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Function {
    /// SHA-256, 32 bytes.
    Sha256,
    /// XXH3-128 with seed 0 in its canonical form (big-endian), 16 bytes.
    Xxh3,
}

/// A digest with the function it is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Digest {
    function: Function,
    bytes: [u8; 32],
}

impl Digest {
    /// Digest of a whole preimage.
    pub(super) fn of(function: Function, preimage: &[u8]) -> Self {
        match function {
            Function::Sha256 => Digest::from_sha256(Sha256::digest(preimage).into()),
            Function::Xxh3 => Digest::from_xxh3(xxh3_128(preimage)),
        }
    }

    /// A SHA-256 digest that is already there.
    pub(super) fn from_sha256(bytes: [u8; 32]) -> Self {
        Digest { function: Function::Sha256, bytes }
    }

    fn from_xxh3(value: u128) -> Self {
        let mut bytes = [0; 32];
        bytes[..16].copy_from_slice(&value.to_be_bytes());
        Digest { function: Function::Xxh3, bytes }
    }

    /// Digest of a preimage that is encoded in chunks: `writer` hands full chunks to its closure and returns how much
    /// of the last one is left to take. Allocates nothing.
    #[inline]
    pub(super) fn of_chunks(function: Function, writer: impl ChunkWriter) -> Self {
        let mut chunk = [0; CHUNK_BYTES];
        match function {
            Function::Sha256 => {
                let mut hasher = Sha256::new();
                let rest = writer.write(&mut chunk, |full| hasher.update(full));
                hasher.update(&chunk[..rest]);
                Digest::from_sha256(hasher.finalize().into())
            }
            Function::Xxh3 => {
                // The incremental state is large; a usual block fits in one chunk and never makes it.
                let mut long: Option<Xxh3> = None;
                let rest = writer.write(&mut chunk, |full| long.get_or_insert_with(Xxh3::new).update(full));
                Digest::from_xxh3(match long {
                    None => xxh3_128(&chunk[..rest]),
                    Some(mut state) => {
                        state.update(&chunk[..rest]);
                        state.digest128()
                    }
                })
            }
        }
    }

    /// The digest, as many bytes as the function has.
    pub(super) fn as_bytes(&self) -> &[u8] {
        match self.function {
            Function::Sha256 => &self.bytes,
            Function::Xxh3 => &self.bytes[..16],
        }
    }

    /// The function the digest is of.
    pub(super) fn function(&self) -> Function {
        self.function
    }

    /// The first 8 bytes, big-endian.
    pub(super) fn first_u64(&self) -> u64 {
        u64::from_be_bytes(self.bytes[..8].try_into().expect("8 bytes were sliced"))
    }

    /// The last 8 bytes, big-endian.
    pub(super) fn last_u64(&self) -> u64 {
        let bytes = self.as_bytes();
        u64::from_be_bytes(bytes[bytes.len() - 8..].try_into().expect("8 bytes were sliced"))
    }
}

/// Bytes encoded between two calls of the digest. A 16-token CBOR block takes at most 117.
pub(super) const CHUNK_BYTES: usize = 256;

/// Something that encodes a preimage chunk by chunk.
pub(super) trait ChunkWriter {
    /// Encodes into `chunk`, giving it to `full` whenever it fills up; returns how much of it is left to take.
    fn write(self, chunk: &mut [u8; CHUNK_BYTES], full: impl FnMut(&[u8])) -> usize;
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes given out in chunks of whatever length.
    struct Pieces<'a>(&'a [u8], usize);

    impl ChunkWriter for Pieces<'_> {
        fn write(self, chunk: &mut [u8; CHUNK_BYTES], mut full: impl FnMut(&[u8])) -> usize {
            let whole = self.0.chunks_exact(self.1);
            let rest = whole.remainder();
            for piece in whole {
                full(piece);
            }
            chunk[..rest.len()].copy_from_slice(rest);
            rest.len()
        }
    }

    #[test]
    fn a_digest_does_not_depend_on_where_chunks_end() {
        let bytes: Vec<u8> = (0..1_000u32).map(|i| (i * 7 / 4) as u8).collect();
        for function in [Function::Sha256, Function::Xxh3] {
            let whole = Digest::of(function, &bytes);
            for piece in 1..=CHUNK_BYTES {
                assert_eq!(Digest::of_chunks(function, Pieces(&bytes, piece)), whole, "{function:?} by {piece}");
            }
        }
    }

    #[test]
    fn ends_are_read_big_endian_from_the_functions_own_length() {
        let sha256 = Digest::of(Function::Sha256, b"abc");
        assert_eq!((sha256.first_u64(), sha256.last_u64()), (0xba78_16bf_8f01_cfea, 0xb410_ff61_f200_15ad));
        let xxh3 = Digest::from_xxh3(0x0011_2233_4455_6677_8899_aabb_ccdd_eeff);
        assert_eq!((xxh3.first_u64(), xxh3.last_u64()), (0x0011_2233_4455_6677, 0x8899_aabb_ccdd_eeff));
        assert_eq!((sha256.as_bytes().len(), xxh3.as_bytes().len()), (32, 16));
    }
}
