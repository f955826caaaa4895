//! State files.
#![no_main]
libfuzzer_sys::fuzz_target!(|bytes: &[u8]| kvlane::ingest::check_any_state_file(bytes));
