//! Bodies of requests, through view, rendering, tokens and keys.
#![no_main]
libfuzzer_sys::fuzz_target!(|input: &[u8]| shards::prompt::check_any_body(input));
