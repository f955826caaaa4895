//! Frames of messages, live and replayed.
#![no_main]
libfuzzer_sys::fuzz_target!(|bytes: &[u8]| kvlane::ingest::check_any_framing(bytes));
