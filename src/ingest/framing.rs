//! What the frames of a message say: live batches, replayed ones, the end of a replay.
//!
//! | message | frames |
//! |---|---|
//! | live | topic, sequence, payload |
//! | replayed: vLLM up to 0.25, SGLang up to 0.5.21 | empty, sequence, payload |
//! | replayed: later ones, TensorRT-LLM | empty, topic, sequence, payload |
//!
//! A sequence is 8 bytes, big-endian; all ones end a replay.

#![forbid(unsafe_code)]

/// A batch as the wire brings it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Framed<'a> {
    Batch(u64, &'a [u8]),
    /// The end of a replay.
    End,
    Malformed,
}

/// A message of a publisher.
pub(crate) fn published<'a>(frames: &[&'a [u8]]) -> Framed<'a> {
    match frames {
        [_, seq, payload] => number(seq).map_or(Framed::Malformed, |seq| Framed::Batch(seq, payload)),
        _ => Framed::Malformed,
    }
}

/// A message of a replay.
pub(crate) fn replayed<'a>(frames: &[&'a [u8]]) -> Framed<'a> {
    let (seq, payload) = match frames {
        [_, seq, payload] | [_, _, seq, payload] => (seq, payload),
        _ => return Framed::Malformed,
    };
    match number(seq) {
        Some(u64::MAX) => Framed::End,
        Some(seq) => Framed::Batch(seq, payload),
        None => Framed::Malformed,
    }
}

fn number(frame: &[u8]) -> Option<u64> {
    frame.try_into().ok().map(u64::from_be_bytes)
}

/// The property that any frames must have, for tests and fuzz targets: no panic, a batch only where a sequence of
/// eight bytes stands before the last frame, and the same batch live and replayed.
///
/// `bytes` are cut into frames: each begins with a byte that says how long it is.
///
/// # Panics
/// Where the property does not hold.
pub fn check_any_framing(bytes: &[u8]) {
    let mut frames = Vec::new();
    let mut rest = bytes;
    while let Some((len, after)) = rest.split_first() {
        let (frame, after) = after.split_at(after.len().min(usize::from(*len)));
        frames.push(frame);
        rest = after;
    }
    let sequence = frames.len().checked_sub(2).and_then(|place| number(frames[place]));
    for (framed, counts) in [(published(&frames), 3..=3), (replayed(&frames), 3..=4)] {
        match framed {
            Framed::Batch(seq, payload) => {
                assert!(counts.contains(&frames.len()));
                assert_eq!((Some(seq), Some(&payload)), (sequence, frames.last()));
                super::check_any_event_bytes(payload);
            }
            Framed::End => assert_eq!(sequence, Some(u64::MAX)),
            Framed::Malformed => assert!(sequence.is_none() || !counts.contains(&frames.len())),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn messages_of_every_layout_are_told_apart() {
        let (seq, end): (&[u8], &[u8]) = (&[0, 0, 0, 0, 0, 0, 0, 9], &[0xff; 8]);
        assert_eq!(published(&[b"kv", seq, b"p"]), Framed::Batch(9, b"p"));
        assert_eq!(replayed(&[b"", seq, b"p"]), Framed::Batch(9, b"p"));
        assert_eq!(replayed(&[b"", b"kv", seq, b"p"]), Framed::Batch(9, b"p"));
        assert_eq!(replayed(&[b"", end, b""]), Framed::End);
        assert_eq!(replayed(&[b"", b"", end, b""]), Framed::End);
        let wrong: [&[&[u8]]; 5] =
            [&[], &[b"kv"], &[b"kv", seq], &[b"kv", b"short", b"p"], &[b"", seq, b"p", b"", b""]];
        for frames in wrong {
            assert_eq!(published(frames), Framed::Malformed);
            assert_eq!(replayed(frames), Framed::Malformed);
        }
        assert_eq!(published(&[b"", b"kv", seq, b"p"]), Framed::Malformed);
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(1_000) })]

        #[test]
        fn any_frames_are_read_without_panic(bytes in prop::collection::vec(prop_oneof![0_u8..10, any::<u8>()], 0..64)) {
            check_any_framing(&bytes);
        }
    }
}
