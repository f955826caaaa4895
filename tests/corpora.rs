//! The fuzz targets' corpora, on the stable toolchain: what once went wrong stays right.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use kvlane::ingest::{check_any_event_bytes, check_any_framing, check_any_state_file, check_any_trtllm_json};
use shards::prompt::{check_any_body, check_any_template};

/// Every target with the fewest files its corpus may have, and the property that it checks.
type Target = (&'static str, usize, fn(&[u8]));
const TARGETS: [Target; 6] = [
    ("chat_template", 32, check_any_template),
    ("event_batch", 40, check_any_event_bytes),
    ("request_body", 56, check_any_body),
    ("state_file", 18, check_any_state_file),
    ("trtllm_json", 26, check_any_trtllm_json),
    ("zmq_framing", 9, check_any_framing),
];

fn fuzz(place: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz").join(place)
}

/// Names in a directory, without what tells their kind.
fn names(place: &str) -> BTreeSet<String> {
    let entries = std::fs::read_dir(fuzz(place)).expect("it is part of the repository");
    let name = |path: PathBuf| Some(path.file_stem()?.to_str()?.to_owned());
    entries.filter_map(|entry| name(entry.expect("an entry").path())).collect()
}

#[test]
fn every_target_has_its_property_over_its_corpus() {
    for (target, at_least, property) in TARGETS {
        let corpus = std::fs::read_dir(fuzz("corpus").join(target)).expect("the corpus is part of the repository");
        let mut files = 0;
        for file in corpus {
            let path = file.expect("an entry").path();
            eprintln!("{}", path.display());
            property(&std::fs::read(path).expect("a file"));
            files += 1;
        }
        assert!(files >= at_least, "{target}: {files} files are too few");
    }
}

#[test]
fn no_target_is_left_out() {
    let known: BTreeSet<_> = TARGETS.iter().map(|(target, ..)| (*target).to_owned()).collect();
    assert_eq!(names("fuzz_targets"), known, "targets");
    assert_eq!(names("corpus"), known, "corpora");
}
