//! Batches of vLLM, SGLang and TensorRT-LLM's stream.
#![no_main]
libfuzzer_sys::fuzz_target!(|payload: &[u8]| kvlane::ingest::check_any_event_bytes(payload));
