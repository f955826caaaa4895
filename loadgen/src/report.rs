//! What a run measured: recorded per thread, merged, and told as text or JSON.
//!
//! Latencies are measured from the moment a request was *meant* to be sent, so a generator or a server that stalls
//! cannot hide the requests it kept waiting (coordinated omission). The generator's own lag is measured beside them,
//! and a report in which that lag is not small refuses a verdict.

use std::time::Duration;

use hdrhistogram::Histogram;
use serde_json::{Value, json};

use crate::client::{Answer, ErrorKind};

/// Longest latency that is told apart, µs (one hour). Longer ones count as this.
const LATENCY_US_MAX: u64 = 3_600_000_000;

/// Largest lag, as a share of TTFT p50, with which figures are worth a verdict.
const LAG_SHARE_MAX: f64 = 0.1;

/// Which quantile of the lag is held against TTFT p50.
const LAG_QUANTILE: f64 = 0.99;

/// A latency distribution with three digits.
#[derive(Clone, Debug)]
pub struct Latency(Histogram<u64>);

impl Default for Latency {
    fn default() -> Self {
        Latency(Histogram::new_with_bounds(1, LATENCY_US_MAX, 3).expect("the bounds are constants in range"))
    }
}

impl Latency {
    /// Counts one latency.
    pub fn record(&mut self, latency: Duration) {
        let us = u64::try_from(latency.as_micros()).unwrap_or(LATENCY_US_MAX);
        self.0.saturating_record(us.clamp(1, LATENCY_US_MAX));
    }

    fn merge(&mut self, other: &Latency) {
        self.0.add(&other.0).expect("both sides have the same bounds");
    }

    /// The latency that the share `quantile` (0 to 1) of all does not exceed, ms; 0 when nothing was recorded.
    #[must_use]
    pub fn quantile_ms(&self, quantile: f64) -> f64 {
        self.0.value_at_quantile(quantile) as f64 / 1e3
    }

    /// The mean, ms; 0 when nothing was recorded.
    #[must_use]
    pub fn mean_ms(&self) -> f64 {
        if self.0.is_empty() { 0.0 } else { self.0.mean() / 1e3 }
    }

    /// How many were recorded.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.0.len()
    }

    fn to_json(&self) -> Value {
        json!({
            "count": self.count(),
            "mean": round3(self.0.mean() / 1e3),
            "p50": self.quantile_ms(0.5),
            "p90": self.quantile_ms(0.9),
            "p99": self.quantile_ms(0.99),
            "p999": self.quantile_ms(0.999),
            "max": self.0.max() as f64 / 1e3,
        })
    }

    fn line(&self, name: &str) -> String {
        if self.count() == 0 {
            return format!("{name:<22} -\n");
        }
        let [p50, p90, p99, p999] = [0.5, 0.9, 0.99, 0.999].map(|q| self.quantile_ms(q));
        let max = self.0.max() as f64 / 1e3;
        format!("{name:<22} {p50:>10.2} {p90:>10.2} {p99:>10.2} {p999:>10.2} {max:>10.2}\n")
    }
}

fn round3(value: f64) -> f64 {
    (value * 1e3).round() / 1e3
}

/// What one thread saw; threads are merged at the end.
#[derive(Clone, Debug, Default)]
pub struct Recorder {
    /// From the intended send time to the first text, of whole answers.
    pub ttft: Latency,
    /// Between two events with text, of whole answers.
    pub inter_token: Latency,
    /// From the intended send time to the last byte, of whole answers.
    pub total: Latency,
    /// The generator's own delay.
    pub lag: Latency,
    /// Requests sent.
    pub sent: u64,
    /// Requests with a whole answer.
    pub completed: u64,
    /// Prompt tokens by the engines' count.
    pub prompt_tokens: u64,
    /// Prompt tokens that the engines found in their caches.
    pub cached_tokens: u64,
    /// Tokens generated.
    pub completion_tokens: u64,
    /// Whole answers without usage: they are missing in the token counts.
    pub without_usage: u64,
    errors: [u64; ErrorKind::ALL.len()],
}

impl Recorder {
    /// Counts a whole answer to a request meant for `intended`.
    pub(crate) fn answer(&mut self, intended: std::time::Instant, answer: &Answer) {
        self.completed += 1;
        self.ttft.record(answer.first_token.saturating_duration_since(intended));
        self.total.record(answer.end.saturating_duration_since(intended));
        for gap in &answer.gaps {
            self.inter_token.record(*gap);
        }
        let Some(usage) = answer.usage else {
            self.without_usage += 1;
            return;
        };
        self.prompt_tokens += usage.prompt_tokens;
        self.cached_tokens += usage.cached_tokens();
        self.completion_tokens += usage.completion_tokens;
    }

    /// Counts a request without a whole answer.
    pub fn error(&mut self, kind: ErrorKind) {
        self.errors[kind as usize] += 1;
    }

    /// Adds what another thread saw.
    pub fn merge(&mut self, other: &Recorder) {
        self.ttft.merge(&other.ttft);
        self.inter_token.merge(&other.inter_token);
        self.total.merge(&other.total);
        self.lag.merge(&other.lag);
        self.sent += other.sent;
        self.completed += other.completed;
        self.prompt_tokens += other.prompt_tokens;
        self.cached_tokens += other.cached_tokens;
        self.completion_tokens += other.completion_tokens;
        self.without_usage += other.without_usage;
        for (sum, errors) in self.errors.iter_mut().zip(other.errors) {
            *sum += errors;
        }
    }

    /// Requests without a whole answer.
    #[must_use]
    pub fn errors(&self) -> u64 {
        self.errors.iter().sum()
    }

    /// Cached prompt tokens over prompt tokens; 0 without any.
    #[must_use]
    pub fn hit_ratio(&self) -> f64 {
        if self.prompt_tokens == 0 { 0.0 } else { self.cached_tokens as f64 / self.prompt_tokens as f64 }
    }

    fn errors_by_kind(&self) -> impl Iterator<Item = (&'static str, u64)> {
        ErrorKind::ALL.iter().map(|kind| kind.name()).zip(self.errors).filter(|(_, count)| *count > 0)
    }
}

/// The runtime that generated the load.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RuntimeUsed {
    /// glommio on io_uring.
    Glommio,
    /// The epoll runtime.
    Epoll {
        /// Why: what glommio said, or that it was asked for.
        reason: String,
    },
}

impl RuntimeUsed {
    /// The name in reports.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            RuntimeUsed::Glommio => "glommio (io_uring)",
            RuntimeUsed::Epoll { .. } => "epoll runtime",
        }
    }
}

/// What the lag of a report is the lag of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LagOf {
    /// Open loop: how late each request left after its intended time.
    Sends,
    /// Closed loop: how late a 10 ms timer fired on the generator's threads.
    Timer,
}

impl LagOf {
    fn name(self) -> &'static str {
        match self {
            LagOf::Sends => "sends late of their intended time",
            LagOf::Timer => "a 10 ms timer late on the generator's threads",
        }
    }
}

/// Whether a report's figures describe the target rather than the generator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// They do.
    Valid,
    /// They do not, and why.
    Refused(String),
}

/// The result of a run.
#[derive(Clone, Debug)]
pub struct Report {
    /// Where requests went.
    pub target: String,
    /// The load, in words.
    pub workload: String,
    /// The pace, in words.
    pub pace: String,
    /// What generated it.
    pub runtime: RuntimeUsed,
    /// Cores of the generator's threads; none = not pinned.
    pub cores: Vec<Option<usize>>,
    /// From the start to the last answer.
    pub elapsed: Duration,
    /// What the lag is the lag of.
    pub lag_of: LagOf,
    /// What was seen.
    pub seen: Recorder,
}

impl Report {
    /// Whether the figures are worth a judgement.
    #[must_use]
    pub fn verdict(&self) -> Verdict {
        if self.seen.ttft.count() == 0 {
            return Verdict::Refused("no request got a whole answer".to_owned());
        }
        if self.seen.lag.count() == 0 {
            return Verdict::Refused("the run was too short to measure the generator's lag".to_owned());
        }
        let (lag, ttft) = (self.seen.lag.quantile_ms(LAG_QUANTILE), self.seen.ttft.quantile_ms(0.5));
        if lag > LAG_SHARE_MAX * ttft {
            return Verdict::Refused(format!(
                "the generator's own lag (p99 {lag:.2} ms) exceeds 10 % of TTFT p50 ({ttft:.2} ms): give it a core of \
                 its own or lower the load"
            ));
        }
        Verdict::Valid
    }

    /// The report for programs. Latencies are in ms.
    #[must_use]
    pub fn to_json(&self) -> Value {
        let seen = &self.seen;
        let reason = match &self.runtime {
            RuntimeUsed::Glommio => None,
            RuntimeUsed::Epoll { reason } => Some(reason),
        };
        let verdict = self.verdict();
        let errors: serde_json::Map<_, _> =
            seen.errors_by_kind().map(|(name, n)| (name.to_owned(), n.into())).collect();
        json!({
            "format": "loadgen-report-1",
            "target": self.target,
            "workload": self.workload,
            "pace": self.pace,
            "runtime": { "name": self.runtime.name(), "reason": reason, "cores": self.cores },
            "seconds": round3(self.elapsed.as_secs_f64()),
            "requests": { "sent": seen.sent, "completed": seen.completed, "errors": seen.errors(), "errors_by_kind": errors },
            "tokens": {
                "prompt": seen.prompt_tokens,
                "cached": seen.cached_tokens,
                "completion": seen.completion_tokens,
                "answers_without_usage": seen.without_usage,
            },
            "hit_ratio": round3(seen.hit_ratio()),
            "ttft_ms": seen.ttft.to_json(),
            "inter_token_ms": seen.inter_token.to_json(),
            "total_ms": seen.total.to_json(),
            "lag_ms": seen.lag.to_json(),
            "lag_of": self.lag_of.name(),
            "verdict": {
                "valid": verdict == Verdict::Valid,
                "reason": match &verdict { Verdict::Valid => None, Verdict::Refused(reason) => Some(reason) },
            },
        })
    }

    /// The report for people.
    #[must_use]
    pub fn to_text(&self) -> String {
        let seen = &self.seen;
        let seconds = self.elapsed.as_secs_f64();
        let mut text = format!("target     {}\nworkload   {}\npace       {}\n", self.target, self.workload, self.pace);
        let cores = self.cores.iter().map(|core| core.map_or("unpinned".to_owned(), |core| core.to_string()));
        let cores = cores.collect::<Vec<_>>().join(",");
        text += &match &self.runtime {
            RuntimeUsed::Glommio => format!("generator  glommio (io_uring), cores {cores}\n"),
            RuntimeUsed::Epoll { reason } => {
                format!("generator  epoll runtime, cores {cores}; not glommio: {reason}\n")
            }
        };
        let rate = seen.completed as f64 / seconds.max(1e-9);
        text += &format!(
            "requests   {} sent, {} completed ({rate:.1}/s), {} errors in {seconds:.1} s\n",
            seen.sent,
            seen.completed,
            seen.errors()
        );
        for (kind, count) in seen.errors_by_kind() {
            text += &format!("           {count} {kind}\n");
        }
        text += &format!(
            "tokens     {} prompt, {} of them cached (hit ratio {:.1} %), {} generated\n",
            seen.prompt_tokens,
            seen.cached_tokens,
            100.0 * seen.hit_ratio(),
            seen.completion_tokens
        );
        if seen.without_usage > 0 {
            text += &format!("           {} answers had no usage and are not in these counts\n", seen.without_usage);
        }
        text += &format!("\n{:<22} {:>10} {:>10} {:>10} {:>10} {:>10}\n", "ms", "p50", "p90", "p99", "p99.9", "max");
        text += &seen.ttft.line("time to first token");
        text += &seen.inter_token.line("inter-token");
        text += &seen.total.line("total");
        text += &seen.lag.line("generator lag");
        text += &format!("\nlag: {}\n", self.lag_of.name());
        match self.verdict() {
            Verdict::Valid => text += "verdict: valid (generator lag p99 within 10 % of TTFT p50)\n",
            Verdict::Refused(reason) => text += &format!("NO VERDICT: {reason}\n"),
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    fn report(ttft_ms: u64, lag_ms: u64) -> Report {
        let mut seen = Recorder::default();
        for _ in 0..100 {
            let intended = Instant::now();
            let first_token = intended + Duration::from_millis(ttft_ms);
            let answer = Answer {
                first_token,
                gaps: vec![Duration::from_millis(2)],
                end: first_token + Duration::from_millis(2),
                usage: None,
            };
            seen.sent += 1;
            seen.answer(intended, &answer);
            seen.lag.record(Duration::from_millis(lag_ms));
        }
        Report {
            target: "http://127.0.0.1:1".to_owned(),
            workload: "w".to_owned(),
            pace: "p".to_owned(),
            runtime: RuntimeUsed::Glommio,
            cores: vec![Some(0)],
            elapsed: Duration::from_secs(2),
            lag_of: LagOf::Sends,
            seen,
        }
    }

    #[test]
    fn a_verdict_is_refused_when_the_generators_own_lag_is_over_a_tenth_of_ttft() {
        assert_eq!(report(100, 9).verdict(), Verdict::Valid);
        let late = report(100, 11);
        assert!(matches!(late.verdict(), Verdict::Refused(_)));
        assert!(late.to_text().contains("NO VERDICT"), "{}", late.to_text());
        assert_eq!(late.to_json()["verdict"]["valid"], false);
        let mut nothing = report(100, 1);
        nothing.seen = Recorder::default();
        assert!(matches!(nothing.verdict(), Verdict::Refused(_)));
    }

    #[test]
    fn latencies_count_from_the_intended_time_and_are_told_in_ms() {
        let report = report(100, 1).to_json();
        assert!((report["ttft_ms"]["p50"].as_f64().unwrap() - 100.0).abs() < 0.2, "{report}");
        assert!((report["total_ms"]["p50"].as_f64().unwrap() - 102.0).abs() < 0.2, "{report}");
        assert_eq!(report["inter_token_ms"]["count"], 100);
        assert_eq!(report["tokens"]["answers_without_usage"], 100);
    }

    #[test]
    fn merging_threads_adds_everything() {
        let mut all = report(10, 1).seen;
        let mut other = report(30, 1).seen;
        other.error(ErrorKind::Timeout);
        all.merge(&other);
        assert_eq!((all.sent, all.completed, all.errors(), all.ttft.count()), (200, 200, 1, 200));
        assert_eq!(all.errors_by_kind().collect::<Vec<_>>(), [("timeout", 1)]);
        assert!(all.ttft.quantile_ms(0.9) > 29.0 && all.ttft.quantile_ms(0.1) < 11.0);
    }
}
