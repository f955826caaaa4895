//! What the runs come to: figures, the table, JSON.

use std::fmt::Write as _;

use serde_json::{Value, json};

use super::fleet::{Outcome, Served};
use super::policy::Kind;
use super::trace::Trace;

/// What counts as served well.
#[derive(Clone, Copy, Debug)]
pub struct Slo {
    /// Seconds to the first token.
    pub first_token: f64,
    /// Seconds per further token, on average over the answer.
    pub per_token: f64,
}

/// One policy in one cell.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    pub kind: Kind,
    /// Part of the prompt tokens that hit.
    pub hits: f64,
    /// Seconds to the first token.
    pub mean: f64,
    pub p50: f64,
    pub p90: f64,
    pub p99: f64,
    /// Seconds per further token of an answer, the mean over answers.
    pub per_token: f64,
    /// Part of the requests that were served as the SLO asks.
    pub goodput: f64,
    /// The busiest worker's part over the mean: of the requests, of the computed tokens.
    pub share: f64,
    pub work_share: f64,
    /// Part of the time that engines computed prompts.
    pub busy: f64,
    pub spills: f64,
    pub seeds: f64,
}

impl Row {
    pub fn new(kind: Kind, trace: &Trace, workers: usize, outcome: &Outcome, slo: Slo) -> Row {
        let served = &outcome.served;
        let count = served.len().max(1) as f64;
        let mut waits: Vec<f64> = served.iter().map(|one| one.first_token).collect();
        waits.sort_by(f64::total_cmp);
        let at = |part: f64| waits.get(((waits.len() - 1) as f64 * part) as usize).copied().unwrap_or(0.0);
        let tokens = trace.requests.iter().map(|request| f64::from(request.tokens));
        let total: f64 = tokens.clone().sum();
        let hit: f64 = served.iter().map(|one| f64::from(one.hit_tokens)).sum();
        let (mut requests, mut work) = (vec![0.0; workers], vec![0.0; workers]);
        for (one, tokens) in served.iter().zip(tokens) {
            requests[usize::from(one.worker)] += 1.0;
            work[usize::from(one.worker)] += tokens - f64::from(one.hit_tokens);
        }
        let streamed: Vec<f64> = served.iter().map(|one| one.per_token).filter(|seconds| *seconds > 0.0).collect();
        let good = |one: &&Served| one.first_token <= slo.first_token && one.per_token <= slo.per_token;
        Row {
            kind,
            hits: hit / total,
            mean: waits.iter().sum::<f64>() / count,
            p50: at(0.5),
            p90: at(0.9),
            p99: at(0.99),
            per_token: streamed.iter().sum::<f64>() / streamed.len().max(1) as f64,
            goodput: served.iter().filter(good).count() as f64 / count,
            share: most_over_mean(&requests),
            work_share: most_over_mean(&work),
            busy: outcome.busy,
            spills: outcome.spills as f64 / count,
            seeds: outcome.seeds as f64 / count,
        }
    }

    /// The mean of several runs of one policy, which are at least one.
    pub fn mean_of(rows: &[Row]) -> Row {
        let mean = |of: fn(&Row) -> f64| rows.iter().map(of).sum::<f64>() / rows.len() as f64;
        Row {
            kind: rows[0].kind,
            hits: mean(|row| row.hits),
            mean: mean(|row| row.mean),
            p50: mean(|row| row.p50),
            p90: mean(|row| row.p90),
            p99: mean(|row| row.p99),
            per_token: mean(|row| row.per_token),
            goodput: mean(|row| row.goodput),
            share: mean(|row| row.share),
            work_share: mean(|row| row.work_share),
            busy: mean(|row| row.busy),
            spills: mean(|row| row.spills),
            seeds: mean(|row| row.seeds),
        }
    }

    fn json(&self) -> Value {
        json!({
            "policy": self.kind.name(), "hit_tokens": self.hits, "ttft_mean_s": self.mean, "ttft_p50_s": self.p50,
            "ttft_p90_s": self.p90, "ttft_p99_s": self.p99, "tpot_mean_s": self.per_token, "goodput": self.goodput,
            "max_share": self.share, "max_work_share": self.work_share, "busy": self.busy, "spills": self.spills,
            "seeds": self.seeds,
        })
    }
}

const TTFT: Kind = Kind::Blend(shards::service::Blend::Ttft);

/// The busiest one's part over the mean.
pub fn most_over_mean(parts: &[f64]) -> f64 {
    let sum: f64 = parts.iter().sum();
    let most = parts.iter().copied().fold(0.0, f64::max);
    if sum > 0.0 { most * parts.len() as f64 / sum } else { 1.0 }
}

/// One trace on one fleet at one load.
#[derive(Clone, Debug)]
pub struct Cell {
    pub trace: String,
    pub requests: usize,
    pub workers: usize,
    /// The fleet's caches over the trace's distinct blocks.
    pub caches: f64,
    pub cache_tokens: u64,
    /// Part of the time that engines compute prompts under `ttft`, as asked for.
    pub load: f64,
    /// How many times as fast the trace was replayed for that.
    pub pace: f64,
    pub rows: Vec<Row>,
}

impl Cell {
    pub fn json(&self) -> Value {
        json!({
            "trace": self.trace, "requests": self.requests, "workers": self.workers, "caches": self.caches,
            "cache_tokens_per_worker": self.cache_tokens, "load": self.load, "pace": self.pace,
            "rows": self.rows.iter().map(Row::json).collect::<Vec<_>>(),
        })
    }

    /// The row of a policy.
    pub fn row(&self, kind: Kind) -> Option<&Row> {
        self.rows.iter().find(|row| row.kind == kind)
    }

    /// The row of a policy other than `ttft` and the oracle that is least in something.
    pub fn least(&self, of: impl Fn(&Row) -> f64) -> Option<&Row> {
        let others = self.rows.iter().filter(|row| ![TTFT, Kind::TtftNoRelief, Kind::Oracle].contains(&row.kind));
        others.min_by(|a, b| of(a).total_cmp(&of(b)))
    }

    /// The whole cell as a table.
    pub fn table(&self) -> String {
        let mut text = format!(
            "### {}, {} workers, caches {} × the working set ({} tokens each), load {:.0} %\n\n\
             {} requests, {:.2} × as fast as recorded.\n\n\
             | policy | hit tokens | TTFT mean | p50 | p90 | p99 | per token | goodput | max share | of work | busy |\n\
             |---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|\n",
            self.trace,
            self.workers,
            self.caches,
            self.cache_tokens,
            self.load * 100.0,
            self.requests,
            self.pace,
        );
        for row in &self.rows {
            let _ = writeln!(
                text,
                "| {} | {:.1} % | {} | {} | {} | {} | {:.1} ms | {:.1} % | {:.2} | {:.2} | {:.0} % |",
                row.kind.name(),
                row.hits * 100.0,
                seconds(row.mean),
                seconds(row.p50),
                seconds(row.p90),
                seconds(row.p99),
                row.per_token * 1e3,
                row.goodput * 100.0,
                row.share,
                row.work_share,
                row.busy * 100.0,
            );
        }
        text
    }
}

/// A time as it is read most easily.
pub fn seconds(value: f64) -> String {
    match value {
        ..1.0 => format!("{:.0} ms", value * 1e3),
        1.0..100.0 => format!("{value:.2} s"),
        _ => format!("{value:.0} s"),
    }
}

/// One line per cell: `ttft` beside round robin, the best of the others, and the oracle; mean and p90 of the time to the
/// first token.
pub fn summary(cells: &[Cell]) -> String {
    let mut text =
        "| trace | workers | caches | load | round robin | best of the others | `ttft` | `ttft`, relief off | oracle \
                    | hit tokens: best, `ttft`, relief off | max share |\n\
                    |---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|\n"
            .to_owned();
    for cell in cells {
        let Some(own) = cell.row(TTFT) else { continue };
        let pair =
            |kind| cell.row(kind).map_or("-".to_owned(), |row| format!("{} / {}", seconds(row.mean), seconds(row.p90)));
        let best = |of: fn(&Row) -> f64| {
            cell.least(of).map_or("-".to_owned(), |row| format!("{} ({})", seconds(of(row)), row.kind.name()))
        };
        let percent = |row: Option<&Row>| row.map_or("-".to_owned(), |row| format!("{:.1}", row.hits * 100.0));
        let _ = writeln!(
            text,
            "| {} | {} | {} × | {:.0} % | {} | {} / {} | {} | {} | {} | {}, {}, {} % | {:.2} |",
            cell.trace,
            cell.workers,
            cell.caches,
            cell.load * 100.0,
            pair(Kind::RoundRobin),
            best(|row| row.mean),
            best(|row| row.p90),
            pair(TTFT),
            pair(Kind::TtftNoRelief),
            pair(Kind::Oracle),
            percent(cell.least(|row| -row.hits)),
            percent(Some(own)),
            percent(cell.row(Kind::TtftNoRelief)),
            own.share,
        );
    }
    text
}

/// Where `ttft`, with relief or without, is more than 3 % above the best of the other policies in mean or p90, or above
/// round robin at all.
pub fn shortfalls(cells: &[Cell]) -> Vec<String> {
    const WITHIN: f64 = 1.03;
    type Figure = (&'static str, fn(&Row) -> f64);
    let figures: [Figure; 2] = [("mean", |row| row.mean), ("p90", |row| row.p90)];
    let mut found = Vec::new();
    for cell in cells {
        for own in [TTFT, Kind::TtftNoRelief].into_iter().filter_map(|kind| cell.row(kind)) {
            for (name, of) in figures {
                let best = cell.least(of).filter(|best| of(own) > WITHIN * of(best));
                let even = cell.row(Kind::RoundRobin).filter(|even| of(own) > of(even));
                let worse = |other: &Row| shortfall(cell, name, (own, of(own)), (other, of(other)));
                found.extend([best, even].into_iter().flatten().map(worse));
            }
        }
    }
    found
}

fn shortfall(cell: &Cell, name: &str, (own, of_own): (&Row, f64), (other, of_other): (&Row, f64)) -> String {
    format!(
        "{} on {} workers, caches {} ×, load {:.0} %: {name} TTFT {} with {}, {} with {} ({:+.0} %)",
        cell.trace,
        cell.workers,
        cell.caches,
        cell.load * 100.0,
        seconds(of_own),
        own.kind.name(),
        seconds(of_other),
        other.kind.name(),
        (of_own / of_other - 1.0) * 100.0
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_the_most_over_the_mean() {
        assert_eq!(most_over_mean(&[1.0, 2.0, 3.0]), 1.5);
        assert_eq!(most_over_mean(&[0.0, 0.0]), 1.0);
    }

    #[test]
    fn times_are_written_short() {
        assert_eq!([0.0123, 1.234, 123.4].map(seconds), ["12 ms", "1.23 s", "123 s"]);
    }
}
