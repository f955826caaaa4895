//! Python's pickle, protocol 5, as CPython's C pickler writes tuples of ints, digests and texts (contract vLLM §1.4).
//!
//! vLLM's default algorithm hashes these bytes, so they must be CPython's to the last one, its accidents included:
//!
//! * every text, digest and tuple takes a memo number; a text *object* seen before is written as a reference. Only
//!   literals of vLLM's own code and texts of at most one Latin-1 character, which CPython keeps single, are such;
//! * output is cut into frames of at least 64 KiB, each cut at the next value; a text of 64 KiB stands outside.

use super::emit::Emit;

/// Bytes in a frame from which the next value begins another.
const FRAME_BYTES_TARGET: usize = 64 * 1024;
/// A last frame with fewer bytes is written without its head.
const FRAME_BYTES_MIN: usize = 4;
/// `95` and the frame's length, 8 bytes little-endian.
const FRAME_HEAD_BYTES: usize = 9;

const PROTOCOL_5: [u8; 2] = [0x80, 0x05];
const STOP: u8 = b'.';
const FRAME: u8 = 0x95;
const MEMOIZE: u8 = 0x94;
const MARK: u8 = b'(';

/// A pickle that is being written to a buffer.
pub(super) struct Pickle<'a> {
    out: &'a mut Vec<u8>,
    /// Where the head of the frame begins that is being written.
    frame: Option<usize>,
    /// Memo numbers given so far.
    memo: u32,
    /// Literals seen, with their memo numbers.
    tags: Vec<(&'static str, u32)>,
    /// Texts of one Latin-1 character seen, or of none.
    shorts: Vec<(Option<char>, u32)>,
}

impl<'a> Pickle<'a> {
    /// Begins a pickle at the buffer's end.
    pub(super) fn begin(out: &'a mut Vec<u8>) -> Self {
        out.extend(PROTOCOL_5);
        Pickle { out, frame: None, memo: 0, tags: Vec::new(), shorts: Vec::new() }
    }

    /// Ends the pickle.
    pub(super) fn finish(mut self) {
        self.put(&[STOP]);
        self.end_frame();
    }

    fn put(&mut self, bytes: &[u8]) {
        if self.frame.is_none() {
            self.frame = Some(self.out.len());
            self.out.extend([FRAME; FRAME_HEAD_BYTES]);
        }
        self.out.extend_from_slice(bytes);
    }

    fn end_frame(&mut self) {
        let Some(start) = self.frame.take() else { return };
        let body = start + FRAME_HEAD_BYTES;
        let length = self.out.len() - body;
        if length < FRAME_BYTES_MIN {
            self.out.drain(start..body);
        } else {
            self.out[start + 1..body].copy_from_slice(&(length as u64).to_le_bytes());
        }
    }

    /// Before each value: a frame that is long enough ends here.
    fn begin_value(&mut self) {
        if self.frame.is_some_and(|start| self.out.len() - start - FRAME_HEAD_BYTES >= FRAME_BYTES_TARGET) {
            self.end_frame();
        }
    }

    /// Gives the value just written its memo number.
    fn memoize(&mut self) -> u32 {
        self.put(&[MEMOIZE]);
        self.memo += 1;
        self.memo - 1
    }

    /// Writes the reference to an object written before.
    fn reference(&mut self, index: u32) {
        match u8::try_from(index) {
            Ok(index) => self.put(&[b'h', index]),
            Err(_) => {
                self.put(b"j");
                self.put(&index.to_le_bytes());
            }
        }
    }

    fn whole_text(&mut self, value: &str) -> u32 {
        match u8::try_from(value.len()) {
            Ok(length) => {
                self.put(&[0x8c, length]);
                self.put(value.as_bytes());
            }
            Err(_) => {
                let mut head = [b'X', 0, 0, 0, 0];
                // A body of 4 GiB does not exist: requests are limited far below.
                head[1..].copy_from_slice(&(value.len() as u32).to_le_bytes());
                if value.len() < FRAME_BYTES_TARGET {
                    self.put(&head);
                    self.put(value.as_bytes());
                } else {
                    self.end_frame();
                    self.out.extend(head);
                    self.out.extend_from_slice(value.as_bytes());
                }
            }
        }
        self.memoize()
    }
}

impl Emit for Pickle<'_> {
    fn none(&mut self) {
        self.begin_value();
        self.put(b"N");
    }

    fn int(&mut self, value: i64) {
        self.begin_value();
        if let Ok(value) = u8::try_from(value) {
            self.put(&[b'K', value]);
        } else if let Ok(value) = u16::try_from(value) {
            let [low, high] = value.to_le_bytes();
            self.put(&[b'M', low, high]);
        } else if let Ok(value) = i32::try_from(value) {
            let [a, b, c, d] = value.to_le_bytes();
            self.put(&[b'J', a, b, c, d]);
        } else {
            // Two's complement without the bytes that only repeat the sign of the byte below them.
            let bytes = value.to_le_bytes();
            let fill = if value < 0 { 0xff } else { 0 };
            let mut length = bytes.len();
            while length > 1 && bytes[length - 1] == fill && (bytes[length - 2] ^ fill) < 0x80 {
                length -= 1;
            }
            self.put(&[0x8a, length as u8]);
            self.put(&bytes[..length]);
        }
    }

    fn uint(&mut self, value: u64) {
        match i64::try_from(value) {
            Ok(value) => self.int(value),
            Err(_) => {
                // The top bit is set: a ninth byte says that it is no sign.
                self.begin_value();
                self.put(&[0x8a, 9]);
                self.put(&value.to_le_bytes());
                self.put(&[0]);
            }
        }
    }

    fn bytes(&mut self, value: &[u8]) {
        self.begin_value();
        let length = u8::try_from(value.len()).expect("a digest has 16 or 32 bytes");
        self.put(&[b'C', length]);
        self.put(value);
        self.memoize();
    }

    fn text(&mut self, value: &str) {
        self.begin_value();
        let mut chars = value.chars();
        let first = chars.next();
        let single = chars.next().is_none() && first.is_none_or(|c| u32::from(c) < 0x100);
        if !single {
            self.whole_text(value);
        } else if let Some(&(_, index)) = self.shorts.iter().find(|(short, _)| *short == first) {
            self.reference(index);
        } else {
            let index = self.whole_text(value);
            self.shorts.push((first, index));
        }
    }

    fn tag(&mut self, value: &'static str) {
        self.begin_value();
        if let Some(&(_, index)) = self.tags.iter().find(|(tag, _)| *tag == value) {
            self.reference(index);
        } else {
            let index = self.whole_text(value);
            self.tags.push((value, index));
        }
    }

    fn open(&mut self, len: usize) {
        self.begin_value();
        if len > 3 {
            self.put(&[MARK]);
        }
    }

    fn close(&mut self, len: usize) {
        match len {
            // The empty tuple is a single object of CPython and takes no memo number.
            0 => return self.put(b")"),
            1 => self.put(&[0x85]),
            2 => self.put(&[0x86]),
            3 => self.put(&[0x87]),
            _ => self.put(b"t"),
        }
        self.memoize();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block::digest::{Digest, Function};
    use crate::block::vectors::hex;

    fn pickled(write: impl Fn(&mut Pickle<'_>)) -> Vec<u8> {
        let mut out = Vec::new();
        let mut pickle = Pickle::begin(&mut out);
        write(&mut pickle);
        pickle.finish();
        out
    }

    fn parent() -> Vec<u8> {
        (0..32).collect()
    }

    /// `(parent, tokens, None)`.
    fn block(tokens: &[u32]) -> Vec<u8> {
        pickled(|out| {
            out.open(3);
            out.bytes(&parent());
            out.open(tokens.len());
            tokens.iter().for_each(|&token| out.int(token.into()));
            out.close(tokens.len());
            out.none();
            out.close(3);
        })
    }

    /// What CPython 3.11's `pickle.dumps(value, protocol=5)` printed, after the two bytes of the protocol.
    #[test]
    fn integers_are_cpythons_at_every_edge() {
        let check = |value: i64, expected| {
            assert_eq!(hex(&pickled(|out| out.int(value))[2..]), expected, "{value}");
        };
        check(0, "4b002e");
        check(255, "4bff2e");
        check(256, "9504000000000000004d00012e");
        check(65_535, "9504000000000000004dffff2e");
        check(65_536, "9506000000000000004a000001002e");
        check(-1, "9506000000000000004affffffff2e");
        check(i32::MIN.into(), "9506000000000000004a000000802e");
        check(i32::MAX.into(), "9506000000000000004affffff7f2e");
        check(1 << 31, "9508000000000000008a0500000080002e");
        check(u32::MAX.into(), "9508000000000000008a05ffffffff002e");
        check(i64::from(i32::MIN) - 1, "9508000000000000008a05ffffff7fff2e");
        check((1 << 39) - 1, "9508000000000000008a05ffffffff7f2e");
        check(1 << 39, "9509000000000000008a060000000080002e");
        check(-(1 << 39), "9508000000000000008a0500000000802e");
        check(-(1 << 39) - 1, "9509000000000000008a06ffffffff7fff2e");
        check(i64::MAX, "950b000000000000008a08ffffffffffffff7f2e");
        check(i64::MIN, "950b000000000000008a0800000000000000802e");
        let unsigned = |value| hex(&pickled(|out| out.uint(value))[2..]);
        assert_eq!(unsigned(7), "4b072e");
        assert_eq!(unsigned(1 << 63), "950c000000000000008a090000000000000080002e");
        assert_eq!(unsigned(u64::MAX), "950c000000000000008a09ffffffffffffffff002e");
    }

    #[test]
    fn equal_texts_of_one_latin_1_character_are_one_object_and_no_others_are() {
        let tuple = |texts: &[&str]| {
            hex(&pickled(|out| {
                out.open(texts.len());
                texts.iter().for_each(|text| out.text(text));
                out.close(texts.len());
            }))
        };
        assert_eq!(tuple(&["a", "a", "ab", "ab"]), "8005951400000000000000288c01619468008c026162948c0261629474942e");
        assert_eq!(tuple(&["é", "é"]), "8005950a000000000000008c02c3a994680086942e");
        assert_eq!(tuple(&["Ā", "Ā"]), "8005950d000000000000008c02c480948c02c4809486942e");
        assert_eq!(tuple(&["", ""]), "80059508000000000000008c0094680086942e");
    }

    #[test]
    fn literals_are_one_object_also_beyond_256_memo_numbers() {
        let pickle = pickled(|out| {
            out.open(3);
            out.bytes(&parent());
            out.open(2);
            out.int(1);
            out.int(2);
            out.close(2);
            out.open(201);
            for item in 0..200 {
                out.open(3);
                out.tag("mm");
                out.text(&format!("id{item:03}"));
                out.int(item);
                out.close(3);
            }
            out.open(1);
            out.text("x");
            out.close(1);
            out.close(201);
            out.close(3);
        });
        check(&pickle, 2_867, "0219063c8587b5de5b6da5a71423224ab3e2d5f4e4fa75e9971853c471a4e5de");
        // The same with the parent's memo number taken by a literal: references of more than one byte.
        let far = pickled(|out| {
            (0..300).for_each(|item| out.text(&format!("text {item}")));
            out.tag("mm");
            out.tag("mm");
        });
        assert!(far.ends_with(&[0x8c, 2, b'm', b'm', MEMOIZE, b'j', 44, 1, 0, 0, STOP]), "{}", hex(&far));
    }

    /// Length and SHA-256 that CPython 3.11 printed.
    fn check(pickle: &[u8], length: usize, digest: &str) {
        assert_eq!(pickle.len(), length);
        assert_eq!(hex(Digest::of(Function::Sha256, pickle).as_bytes()), digest, "{length} bytes");
    }

    #[test]
    fn texts_of_every_length_are_cpythons() {
        let text = |length| {
            pickled(|out| {
                out.open(3);
                out.bytes(&parent());
                out.open(2);
                out.int(1);
                out.int(2);
                out.close(2);
                out.open(2);
                out.text(&"s".repeat(length));
                out.text("q");
                out.close(2);
                out.close(3);
            })
        };
        check(&text(255), 319, "c366778af239aac2aebe17426a9b9ff8b5b510bdac6e72ac84432a7bdbbd4133");
        check(&text(256), 323, "c5cfaff5eb29ea2f0604b8f45f956d567d4d6ddba81dd5ac1f8455c664dbc86b");
        check(&text(65_535), 65_611, "1cfe29d9cf33f040cb05f17623b3071ff85fd205e8a75fa3cf080338b978f0ea");
        check(&text(65_536), 65_612, "b2157c093e149d83a776a4fbc30c86a9f4cd6ff77d49dab1b56f4ea585cf57b8");
        check(&text(70_000), 70_076, "ede60f699273d9b4bda20fdab99130581c5ccb768360366f37212bff4a56b9d4");
    }

    #[test]
    fn blocks_longer_than_a_frame_are_cpythons() {
        let mixed = |size: u32| {
            let tokens: Vec<u32> = (0..size).map(|i| i.wrapping_mul(2_654_435_761) >> (i % 29)).collect();
            block(&tokens)
        };
        check(&mixed(13_107), 50_588, "9b0a04698644c0ac6ba65b66f86ed50afe9ee352b40e11914120c8031c1b553a");
        check(&mixed(20_000), 77_272, "36fbf0433d8dd7eca509be309def234d54e6e5712d0dc8394297351e3d25543c");
        check(&mixed(70_000), 270_420, "a4d91fe925b755cbcddfa6199f81024235149e67d4ec8cdb787ec89957480506");
        // Where a frame ends just before the tokens' end: the last one is short.
        let small = |size| block(&vec![5; size]);
        check(&small(32_743), 65_539, "d965cfb527d9022ffcce57679e5c3c62174a401fa6779dcccbf4db95b264aafd");
        check(&small(32_748), 65_549, "e21cfd5b101216b3872d29bdcc084f528945aae848e82db67b4e58612e526524");
        check(&small(32_749), 65_560, "c389ed633d9a6c87231db0359e51acec59693b447d0913da53d669d3c9d92a49");
        check(&small(32_751), 65_564, "ec36c0a5a8d2ac1bfad582f68edd42ae20df00aaa3888b63b8919cec926a0c17");
        check(&small(32_753), 65_568, "06655c49e9ccbd2060c6d396605f33daadad784538469b898cfefd1d359cfc30");
    }
}
