//! Random histories of whole fleets, from the bytes of frames to what a reader of the inventory is told, against a model
//! that knows what every engine really holds.
//!
//! A history is a number: `KVLANE_HISTORIES=100000` runs so many, from `KVLANE_HISTORY_SEED` on (default 0). One that
//! ends in a difference says its number, and the fewest steps of it that still do; `KVLANE_HISTORY_SEED=N
//! KVLANE_HISTORIES=1` runs it again, with `KVLANE_HISTORY_STEPS=M` as far as that.

mod chance;
mod engine;
mod fleet;
mod gateway;
mod trtllm;
mod wire;

use std::panic::{AssertUnwindSafe, catch_unwind};

use fleet::Fleet;
use trtllm::Drains;

/// Steps of the longest.
const STEPS_MAX: usize = 120;

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name} is a number, not {text:?}")))
}

/// Runs one history; what differs at its end, if anything does.
fn outcome(history: impl FnOnce()) -> Result<(), String> {
    catch_unwind(AssertUnwindSafe(history)).map_err(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned())).unwrap_or_default()
    })
}

/// Runs histories by their numbers: so many of them, unless the environment says otherwise.
fn run(histories: u64, live: impl Fn(u64, usize)) {
    let from = number("KVLANE_HISTORY_SEED").unwrap_or(0);
    let histories = number("KVLANE_HISTORIES").unwrap_or(histories);
    let steps = number("KVLANE_HISTORY_STEPS").map_or(STEPS_MAX, |steps| steps as usize);
    let start = std::time::Instant::now();
    for seed in from..from + histories {
        if let Err(difference) = outcome(|| live(seed, steps)) {
            let fewest = (0..=steps).find(|steps| outcome(|| live(seed, *steps)).is_err()).unwrap_or(steps);
            panic!(
                "history {seed}, from {fewest} steps on (again: KVLANE_HISTORY_SEED={seed} KVLANE_HISTORIES=1 \
                 KVLANE_HISTORY_STEPS={fewest}): {difference}"
            );
        }
    }
    eprintln!("{histories} histories from {from} on, {steps} steps at most: {:.1} s", start.elapsed().as_secs_f64());
}

#[test]
fn any_history_of_a_fleet_ends_as_what_its_engines_hold() {
    run(2_000, |seed, steps| Fleet::new(seed).live(steps));
}

#[test]
fn any_history_of_drained_engines_ends_as_what_they_hold() {
    run(2_000, |seed, steps| Drains::new(seed).live(steps));
}
