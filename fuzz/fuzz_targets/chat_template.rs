//! Chat templates, with a chat behind a zero byte.
#![no_main]
libfuzzer_sys::fuzz_target!(|input: &[u8]| shards::prompt::check_any_template(input));
