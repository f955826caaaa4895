//! The simulation as a whole, on a small trace made here.

use super::incidents;
use super::trace::{Raw, Request};
use super::*;
use crate::ingest::fleet::Rng;

const BLOCK: u32 = 64;

/// Conversations of a few turns, each of which goes on where the last one ended, behind one of two system prompts.
fn conversations(count: u64, turns: u64, seconds: f64) -> Trace {
    let mut rng = Rng::new(5);
    let mut raw = Vec::new();
    for session in 0..count {
        let (mut at, mut blocks) =
            (trace::unit(&mut rng) * seconds, (0..8).map(|n| session % 2 * 100 + n).collect::<Vec<_>>());
        for turn in 0..turns {
            let added = 4 + rng.below(24) as u64;
            blocks.extend((0..added).map(|n| (session + 1) << 32 | turn << 16 | n));
            let tokens = blocks.len() as u32 * BLOCK + 7;
            let request = Request { at, session, tokens, answer: 20 + rng.below(100) as u32, prompt: 0 };
            raw.push(Raw { request, blocks: blocks.clone() });
            at += 5.0 + trace::unit(&mut rng) * 20.0;
        }
    }
    Trace::new("conversations", BLOCK, raw).expect("requests")
}

fn row_of(trace: &Trace, setup: &Setup, kind: Kind) -> Row {
    let outcome = fleet::run(trace, setup, &mut Policy::new(kind, &[]));
    Row::new(kind, trace, setup.workers, &outcome, Slo { first_token: 5.0, per_token: 0.1 })
}

#[test]
fn ttft_hits_more_and_waits_less_than_what_looks_at_neither_prompt_nor_load() {
    let trace = conversations(300, 6, 300.0);
    let setup = set_up(&trace, 4, 1.0, 0.6, 1, THROUGHPUT);
    let [ttft, even, random] =
        [Kind::Blend(Blend::Ttft), Kind::RoundRobin, Kind::SessionHash].map(|kind| row_of(&trace, &setup, kind));
    assert!(ttft.hits > even.hits + 0.2, "{} against {} of the tokens", ttft.hits, even.hits);
    assert!(ttft.mean < even.mean && ttft.p90 < even.p90, "{ttft:?} {even:?}");
    assert!(ttft.mean < random.mean, "{ttft:?} {random:?}");
    assert!((ttft.busy - 0.6).abs() < 0.05, "the load is what was asked for: {}", ttft.busy);
}

#[test]
fn equal_seeds_give_equal_outcomes_and_others_do_not() {
    let trace = conversations(40, 4, 60.0);
    let setup = |seed| Setup { seed, ..set_up(&trace, 3, 0.5, 0.6, 1, THROUGHPUT) };
    let served = |seed| fleet::run(&trace, &setup(seed), &mut Policy::new(Kind::Blend(Blend::Ttft), &[])).served;
    assert_eq!(served(1), served(1));
    assert_ne!(served(1), served(2));
}

#[test]
fn the_oracle_hits_all_that_any_worker_has() {
    let trace = conversations(60, 5, 100.0);
    let setup = set_up(&trace, 4, 3.0, 0.6, 1, THROUGHPUT);
    let [oracle, ttft, longest] =
        [Kind::Oracle, Kind::Blend(Blend::Ttft), Kind::LongestMatch].map(|kind| row_of(&trace, &setup, kind));
    assert!(oracle.hits >= ttft.hits && oracle.hits >= longest.hits, "{oracle:?} {ttft:?} {longest:?}");
}

#[test]
fn a_worker_that_is_slow_gets_less_and_one_that_is_fast_again_its_part() {
    let trace = conversations(600, 6, 900.0);
    let setup = set_up(&trace, 4, 1.0, 0.5, 1, THROUGHPUT);
    let (_, shares) = incidents::slow_then_fast(&trace, &setup);
    let work: Vec<f64> = shares.iter().map(|(_, work)| *work).collect();
    let mean = |of: &[f64]| of.iter().sum::<f64>() / of.len() as f64;
    // A third of the others' speed is 0.4 of a fair part of four.
    assert!(mean(&work[2..6]) < 0.65, "{work:?}");
    assert!((0.8..1.25).contains(&mean(&work[8..11])), "{work:?}");
}

#[test]
fn a_worker_that_was_restarted_has_its_fair_share_soon() {
    let trace = conversations(600, 6, 900.0);
    let setup = set_up(&trace, 4, 1.0, 0.6, 1, THROUGHPUT);
    // Every sixteenth hit goes to a cold worker, which is cold no more after one prompt of a few hundred tokens.
    let requests = incidents::restarted(&trace, &setup).expect("it comes back");
    assert!(requests <= 40 + 400, "{requests}");
}

#[test]
fn a_log_of_a_run_says_what_the_run_was() {
    let trace = conversations(20, 3, 60.0);
    let setup = set_up(&trace, 2, 1.0, 0.5, 1, THROUGHPUT);
    let outcome = fleet::run(&trace, &setup, &mut Policy::new(Kind::Blend(Blend::Ttft), &[]));
    let path = std::env::temp_dir().join(format!("kvlane-simulate-{}.jsonl", std::process::id()));
    let mut bytes = Vec::new();
    log::write(&mut bytes, &trace, &outcome).unwrap();
    std::fs::write(&path, bytes).unwrap();
    let recording = log::read(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    let endpoints: Vec<u16> = outcome.served.iter().map(|served| served.worker).collect();
    assert_eq!(recording.endpoints, endpoints);
    assert_eq!(recording.trace.working_set_blocks(), trace.working_set_blocks());
    let setup = Setup { pace: 1.0, ..setup };
    let again = fleet::run(&recording.trace, &setup, &mut Policy::new(Kind::Recorded, &recording.endpoints));
    assert!(again.served.iter().map(|served| served.hit_tokens).sum::<u32>() > 0);
}

#[test]
fn a_small_table_is_printed_and_drawn() {
    let directory = std::env::temp_dir().join(format!("kvlane-simulate-table-{}", std::process::id()));
    std::fs::create_dir_all(&directory).unwrap();
    let file = directory.join("small.jsonl");
    let row = |n: u64| {
        let ids = [0, n % 5 + 1, 100 + n];
        json!({"timestamp": n * 100, "input_length": 1400, "output_length": 20, "hash_ids": ids}).to_string()
    };
    std::fs::write(&file, (0..200).map(|n| row(n) + "\n").collect::<String>()).unwrap();
    let (svg, json) = (directory.join("small.svg"), directory.join("small.json"));
    let command = ["simulate", "--traces", file.to_str().unwrap(), "--workers", "2", "--caches", "1", "--loads", "60"];
    let more = ["--runs", "1", "--tables", "--svg", svg.to_str().unwrap(), "--json", json.to_str().unwrap()];
    let args = parsed(&[&command[..], &more[..]].concat());
    let mut out = Vec::new();
    run(&args, &mut out).unwrap();
    let out = String::from_utf8(out).unwrap();
    assert!(Kind::ALL.iter().all(|kind| out.contains(&format!("| {} |", kind.name()))), "{out}");
    assert!(out.contains("| small | 2 | 1 × | 60 % |"), "{out}");
    assert!(std::fs::read_to_string(&svg).unwrap().contains("<svg"));
    let value: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(&json).unwrap()).unwrap();
    assert_eq!(value["cells"][0]["rows"].as_array().unwrap().len(), Kind::ALL.len());
    std::fs::remove_dir_all(&directory).unwrap();
}

#[derive(clap::Parser)]
struct Line {
    #[command(flatten)]
    args: Args,
}

fn parsed(line: &[&str]) -> Args {
    <Line as clap::Parser>::parse_from(line).args
}
