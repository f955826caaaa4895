//! The fuzz targets' corpora, on the stable toolchain: what once went wrong stays right.

use std::path::Path;

use kvlane::ingest::{check_any_event_bytes, check_any_framing, check_any_trtllm_json};

/// Runs every file of a target's corpus through its property.
fn check(target: &str, at_least: usize, property: fn(&[u8])) {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(target);
    let files: Vec<_> = std::fs::read_dir(&corpus).expect("the corpus is part of the repository").collect();
    for file in &files {
        let path = file.as_ref().expect("an entry").path();
        eprintln!("{}", path.display());
        property(&std::fs::read(path).expect("a file"));
    }
    assert!(files.len() >= at_least, "{target}: {} files are too few", files.len());
}

#[test]
fn event_batches() {
    check("event_batch", 40, check_any_event_bytes);
}

#[test]
fn drained_answers() {
    check("trtllm_json", 26, check_any_trtllm_json);
}

#[test]
fn frames() {
    check("zmq_framing", 9, check_any_framing);
}
