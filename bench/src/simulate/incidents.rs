//! What becomes of one worker among many that is slow and then fast, or is started anew with an empty cache.

use std::fmt::Write as _;

use shards::service::Blend;

use super::fleet::{Incident, Outcome, Setup, run};
use super::policy::{Kind, Policy};
use super::report::{Row, Slo};
use super::trace::Trace;

/// Parts of the run that shares are told of.
const WINDOWS: usize = 12;
/// The worker that it happens to.
const WORKER: usize = 0;
/// How many times slower it is at first.
const SLOWER: f64 = 3.0;
/// Part of its fair share that a restarted worker has to reach.
const FAIR_ENOUGH: f64 = 0.9;

/// The worker's part of the requests, and of the computed tokens, over the fair part of one worker, by window.
fn shares(trace: &Trace, setup: &Setup, outcome: &Outcome, windows: usize) -> Vec<(f64, f64)> {
    let end = trace.duration() / setup.pace;
    let mut sums = vec![[0.0; 4]; windows];
    for (request, served) in trace.requests.iter().zip(&outcome.served) {
        let window = ((served.at / end * windows as f64) as usize).min(windows - 1);
        let own = f64::from(u8::from(usize::from(served.worker) == WORKER));
        let computed = f64::from(request.tokens - served.hit_tokens);
        let sum = &mut sums[window];
        [sum[0], sum[1], sum[2], sum[3]] = [sum[0] + own, sum[1] + 1.0, sum[2] + own * computed, sum[3] + computed];
    }
    let fair = setup.workers as f64;
    sums.iter().map(|sum| (sum[0] / sum[1].max(1.0) * fair, sum[2] / sum[3].max(1.0) * fair)).collect()
}

/// One worker three times slower than the others for half of the run, then as fast.
pub fn slow_then_fast(trace: &Trace, setup: &Setup) -> (Outcome, Vec<(f64, f64)>) {
    let half = trace.duration() / setup.pace / 2.0;
    let incidents = vec![
        (0.0, Incident::Speed { worker: WORKER, factor: 1.0 / SLOWER }),
        (half, Incident::Speed { worker: WORKER, factor: 1.0 }),
    ];
    let setup = Setup { incidents, ..setup.clone() };
    let outcome = run(trace, &setup, &mut Policy::new(Kind::Blend(Blend::Ttft), &[]));
    let shares = shares(trace, &setup, &outcome, WINDOWS);
    (outcome, shares)
}

/// One worker is taken out, and comes back with an empty cache. Requests of the fleet from there on, until it has 90 % of
/// its fair share of as many as the fleet has workers, ten times over.
pub fn restarted(trace: &Trace, setup: &Setup) -> Option<usize> {
    let half = trace.duration() / setup.pace / 2.0;
    let incidents = vec![(half, Incident::Down(WORKER)), (half + 30.0, Incident::Restarted(WORKER))];
    let setup = Setup { incidents, ..setup.clone() };
    let outcome = run(trace, &setup, &mut Policy::new(Kind::Blend(Blend::Ttft), &[]));
    let is_own = |at: usize| usize::from(outcome.served[at].worker) == WORKER;
    let down = outcome.served.iter().position(|served| served.at >= half)?;
    let back = (down..outcome.served.len()).find(|at| outcome.served[*at].at > half + 30.0 && is_own(*at))?;
    let window = setup.workers * 10;
    let fair = window as f64 / setup.workers as f64;
    (back..outcome.served.len().saturating_sub(window)).find_map(|from| {
        let own = (from..from + window).filter(|at| is_own(*at)).count();
        (own as f64 >= FAIR_ENOUGH * fair).then_some(from + window - back)
    })
}

/// Both, in words.
pub fn report(trace: &Trace, setup: &Setup, slo: Slo) -> String {
    let (outcome, shares) = slow_then_fast(trace, setup);
    let row = Row::new(Kind::Blend(Blend::Ttft), trace, setup.workers, &outcome, slo);
    let even = {
        let half = trace.duration() / setup.pace / 2.0;
        let incidents = vec![
            (0.0, Incident::Speed { worker: WORKER, factor: 1.0 / SLOWER }),
            (half, Incident::Speed { worker: WORKER, factor: 1.0 }),
        ];
        let setup = Setup { incidents, ..setup.clone() };
        run(trace, &setup, &mut Policy::new(Kind::RoundRobin, &[]))
    };
    let even = Row::new(Kind::RoundRobin, trace, setup.workers, &even, slo);
    let mut text = format!(
        "{}: worker {WORKER} is {SLOWER} times slower until half-time, then as fast as the others. TTFT mean {:.2} s, p90 \
         {:.2} s (round robin: {:.2} s, {:.2} s). Its part of the requests, and of the computed tokens, over a fair one:\n",
        trace.name, row.mean, row.p90, even.mean, even.p90
    );
    for (requests, work) in shares {
        let _ = write!(text, " {requests:.2}/{work:.2}");
    }
    let restarted = restarted(trace, setup)
        .map_or("never".to_owned(), |requests| format!("after {requests} requests of the fleet"));
    let _ = writeln!(
        text,
        "\n{}: restarted with an empty cache, worker {WORKER} has 90 % of its fair share {restarted}.",
        trace.name
    );
    text
}
