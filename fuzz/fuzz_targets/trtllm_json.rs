//! Answers of TensorRT-LLM's drain.
#![no_main]
libfuzzer_sys::fuzz_target!(|body: &[u8]| kvlane::ingest::check_any_trtllm_json(body));
