//! What the two phases of the demo showed, side by side, and whether it is what KV-exact routing promises.

use serde_json::{Value, json};

use crate::report::{Report, Verdict};

/// Largest share of one endpoint, in means, that a trace may show.
const SHARE_MAX: f64 = 1.5;

/// How many times round robin's hit ratio KV-exact routing must reach on the built-in chat.
const HIT_GAIN_MIN: f64 = 2.0;

/// One phase: what the generator saw, and what each engine served.
#[derive(Clone, Debug)]
pub(super) struct Phase {
    pub(super) name: &'static str,
    pub(super) report: Report,
    /// Requests finished by each engine, by its own count.
    pub(super) served: Vec<u64>,
    /// What drives the gateway's shards, by its own word.
    pub(super) driver: String,
}

impl Phase {
    /// The busiest endpoint's requests over the mean; 0 when none served anything.
    fn imbalance(&self) -> f64 {
        let sum: u64 = self.served.iter().sum();
        let most = self.served.iter().max().copied().unwrap_or(0);
        if sum == 0 { 0.0 } else { most as f64 * self.served.len() as f64 / sum as f64 }
    }

    fn shares(&self) -> String {
        let sum = self.served.iter().sum::<u64>().max(1) as f64;
        let shares = self.served.iter().map(|&count| format!("{:.0}", 100.0 * count as f64 / sum));
        shares.collect::<Vec<_>>().join(" / ")
    }

    fn to_json(&self) -> Value {
        json!({
            "name": self.name,
            "report": self.report.to_json(),
            "served": self.served,
            "imbalance": self.imbalance(),
            "gateway_driver": self.driver,
        })
    }
}

/// What was played, which decides what is promised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Played {
    /// The built-in chat: more hits and a faster first token.
    Chat,
    /// A trace: balance, and nothing slower.
    Trace,
}

/// Something that was promised, and whether it held.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Check {
    name: &'static str,
    passed: bool,
    detail: String,
}

/// Both phases and the checks.
pub(super) struct Comparison {
    round_robin: Phase,
    exact: Phase,
    checks: Vec<Check>,
}

impl Comparison {
    pub(super) fn new(played: Played, round_robin: Phase, exact: Phase) -> Self {
        let checks = checks(played, &round_robin, &exact);
        Comparison { round_robin, exact, checks }
    }

    pub(super) fn passed(&self) -> bool {
        self.checks.iter().all(|check| check.passed)
    }

    pub(super) fn to_json(&self) -> Value {
        let checks = self
            .checks
            .iter()
            .map(|check| json!({ "name": check.name, "passed": check.passed, "detail": check.detail }));
        json!({
            "format": "loadgen-demo-1",
            "phases": [self.round_robin.to_json(), self.exact.to_json()],
            "checks": checks.collect::<Vec<_>>(),
            "passed": self.passed(),
        })
    }

    pub(super) fn to_text(&self) -> String {
        let row = |name: &str, cell: &dyn Fn(&Phase) -> String| {
            format!("{name:<26} {:>20} {:>20}\n", cell(&self.round_robin), cell(&self.exact))
        };
        let mut text = row("", &|phase| phase.name.to_owned());
        text += &row("requests", &|phase| phase.report.seen.completed.to_string());
        text += &row("errors", &|phase| phase.report.seen.errors().to_string());
        text += &row("prompt tokens cached", &|phase| format!("{:.1} %", 100.0 * phase.report.seen.hit_ratio()));
        for (name, quantile) in [("TTFT p50", 0.5), ("TTFT p90", 0.9), ("TTFT p99", 0.99)] {
            text += &row(name, &|phase| format!("{:.1} ms", phase.report.seen.ttft.quantile_ms(quantile)));
        }
        text += &row("inter-token p50", &|phase| format!("{:.1} ms", phase.report.seen.inter_token.quantile_ms(0.5)));
        text += &row("share of engines, %", &Phase::shares);
        text += &row("busiest engine / mean", &|phase| format!("{:.2}", phase.imbalance()));
        text += &row("generator lag p99", &|phase| format!("{:.2} ms", phase.report.seen.lag.quantile_ms(0.99)));
        text += &row("gateway driver", &|phase| phase.driver.clone());
        text += &row("generator", &|phase| phase.report.runtime.name().to_owned());
        text.push('\n');
        for check in &self.checks {
            text += &format!("{}  {}: {}\n", if check.passed { "ok    " } else { "FAILED" }, check.name, check.detail);
        }
        text
    }
}

fn checks(played: Played, round_robin: &Phase, exact: &Phase) -> Vec<Check> {
    let mut checks = Vec::new();
    let mut check = |name, passed, detail| checks.push(Check { name, passed, detail });
    let errors = [round_robin, exact].map(|phase| phase.report.seen.errors());
    check("no errors", errors == [0, 0], format!("{} and {}", errors[0], errors[1]));
    let ttft = |quantile| [round_robin, exact].map(|phase| phase.report.seen.ttft.quantile_ms(quantile));
    let told = |ttft: [f64; 2]| format!("{:.1} ms, round robin {:.1} ms", ttft[1], ttft[0]);
    match played {
        Played::Chat => {
            let [before, after] = [round_robin, exact].map(|phase| phase.report.seen.hit_ratio());
            let detail = format!("{:.1} %, round robin {:.1} %", 100.0 * after, 100.0 * before);
            check("at least twice the hits", after > 0.0 && after >= HIT_GAIN_MIN * before, detail);
            check("lower TTFT p50", ttft(0.5)[1] < ttft(0.5)[0], told(ttft(0.5)));
        }
        Played::Trace => {
            let imbalance = exact.imbalance();
            let balanced = imbalance > 0.0 && imbalance <= SHARE_MAX;
            check("no engine over 1.5 × the mean", balanced, format!("busiest {imbalance:.2} ×"));
            check("TTFT p50 not worse", ttft(0.5)[1] <= ttft(0.5)[0], told(ttft(0.5)));
            check("TTFT p99 not worse", ttft(0.99)[1] <= ttft(0.99)[0], told(ttft(0.99)));
        }
    }
    for phase in [round_robin, exact] {
        let (valid, detail) = match phase.report.verdict() {
            Verdict::Valid => (true, format!("{}: lag p99 within 10 % of TTFT p50", phase.name)),
            Verdict::Refused(reason) => (false, format!("{}: no verdict, {reason}", phase.name)),
        };
        check("figures worth a verdict", valid, detail);
    }
    checks
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;
    use crate::client::{Answer, ErrorKind};
    use crate::report::{LagOf, Recorder, RuntimeUsed};

    fn phase(cached_percent: u64, ttft_ms: u64, served: &[u64]) -> Phase {
        let mut seen = Recorder::default();
        let now = Instant::now();
        let first_token = now + Duration::from_millis(ttft_ms);
        seen.answer(now, &Answer { first_token, gaps: Vec::new(), end: first_token, usage: None });
        seen.lag.record(Duration::from_millis(1));
        (seen.prompt_tokens, seen.cached_tokens) = (100, cached_percent);
        let report = Report {
            target: String::new(),
            workload: String::new(),
            pace: String::new(),
            runtime: RuntimeUsed::Glommio,
            cores: vec![None],
            elapsed: Duration::from_secs(1),
            lag_of: LagOf::Sends,
            seen,
        };
        Phase { name: "x", report, served: served.to_vec(), driver: "io_uring".to_owned() }
    }

    fn failed(played: Played, round_robin: Phase, exact: Phase) -> Vec<&'static str> {
        let comparison = Comparison::new(played, round_robin, exact);
        let failed: Vec<_> = comparison.checks.iter().filter(|check| !check.passed).map(|check| check.name).collect();
        assert_eq!(comparison.passed(), failed.is_empty());
        assert_eq!(comparison.to_text().contains("FAILED"), !failed.is_empty());
        failed
    }

    #[test]
    fn the_chat_must_show_twice_the_hits_and_a_faster_first_token() {
        let even = [5, 5, 5, 5];
        assert!(failed(Played::Chat, phase(20, 200, &even), phase(60, 80, &even)).is_empty());
        assert_eq!(failed(Played::Chat, phase(40, 200, &even), phase(60, 80, &even)), ["at least twice the hits"]);
        assert_eq!(failed(Played::Chat, phase(0, 200, &even), phase(0, 80, &even)), ["at least twice the hits"]);
        assert_eq!(failed(Played::Chat, phase(20, 80, &even), phase(60, 80, &even)), ["lower TTFT p50"]);
        let mut broken = phase(60, 80, &even);
        broken.report.seen.error(ErrorKind::Broken);
        assert_eq!(failed(Played::Chat, phase(20, 200, &even), broken), ["no errors"]);
        let mut late = phase(60, 80, &even);
        late.report.seen.lag.record(Duration::from_millis(50));
        assert_eq!(failed(Played::Chat, phase(20, 200, &even), late), ["figures worth a verdict"]);
    }

    #[test]
    fn a_trace_must_be_balanced_and_not_slower() {
        let even = [5, 5, 5, 5];
        assert!(failed(Played::Trace, phase(20, 90, &even), phase(30, 90, &[7, 3, 5, 5])).is_empty());
        let uneven = failed(Played::Trace, phase(20, 90, &even), phase(30, 90, &[17, 1, 1, 1]));
        assert_eq!(uneven, ["no engine over 1.5 × the mean"]);
        let slower = failed(Played::Trace, phase(20, 90, &even), phase(30, 95, &even));
        assert_eq!(slower, ["TTFT p50 not worse", "TTFT p99 not worse"]);
    }
}
