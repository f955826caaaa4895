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
