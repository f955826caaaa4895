//! Counters of requests with a prefill and a decode leg, by the reference's names.
//!
//! The `model` label is the rule's `model_name`, empty for rules for any model: what clients ask for is not bounded.

use std::sync::atomic::Ordering;

use prometheus_client::encoding::{EncodeMetric, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use shards::disagg::stats::{BUCKETS_MS, Histogram, LegOutcome, PdStats};
use shards::route::{Why, break_even};
use shards::service::Role;

use crate::supervise::{Entry, View};

use super::metrics::{Families, Labels};

/// Writes them, for rules that have such requests.
pub(super) fn encode(families: &mut Families<'_>, view: &View) -> std::fmt::Result {
    let entries: Vec<&Entry> = view
        .entries
        .iter()
        .map(std::convert::AsRef::as_ref)
        .filter(|entry: &&Entry| entry.service.pd.is_some())
        .collect();
    let Some(first) = entries.first() else { return Ok(()) };
    let legs = entries.iter().flat_map(|entry| {
        ["prefill", "decode"].into_iter().flat_map(move |phase| {
            LegOutcome::ALL.into_iter().map(move |outcome| {
                let of = |stats: &PdStats| {
                    let legs = if phase == "prefill" { &stats.prefill } else { &stats.decode };
                    legs[outcome as usize].load(Ordering::Relaxed)
                };
                (labels(entry, &[("phase", phase), ("status", outcome.name())]), sum(entry, of))
            })
        })
    });
    families.counter("loxilb_ai_pd_requests", "Legs by their outcome", legs)?;
    let straight = entries.iter().flat_map(|entry| {
        Why::ALL.into_iter().map(move |why| {
            let of = |stats: &PdStats| stats.bypassed[why as usize].load(Ordering::Relaxed);
            (labels(entry, &[("reason", why.name())]), sum(entry, of))
        })
    });
    families.counter("kvlane_pd_bypassed", "Requests that went straight to a decode endpoint, and why", straight)?;
    // Every service has the same series.
    for place in 0..first.shared.stats[0].pd.series().len() {
        let (name, _) = first.shared.stats[0].pd.series()[place];
        let samples = entries
            .iter()
            .map(|entry| (labels(entry, &[]), sum(entry, |stats| stats.series()[place].1.load(Ordering::Relaxed))));
        families.counter(name, "Requests with two legs: see the documentation of P/D", samples)?;
    }
    type Read = fn(&PdStats) -> &Histogram;
    let times: [(&str, &str, Read); 2] = [
        ("loxilb_ai_pd_prefill_duration_seconds", "Time of prefill legs that ended well", |s| &s.prefill_time),
        ("loxilb_ai_pd_decode_ttft_seconds", "Time from a decode leg's dispatch to its first byte", |s| &s.decode_ttft),
    ];
    for (name, help, read) in times {
        let samples = entries.iter().map(|entry| (labels(entry, &[]), Times::of(entry, read)));
        families.metrics(name, help, MetricType::Histogram, samples)?;
    }
    let break_even = entries.iter().filter_map(|entry| {
        let tokens = break_even(&entry.shared.rates, &entry.shared.moves)?;
        Some((labels(entry, &[]), u64::from(tokens)))
    });
    let help = "Tokens that an idle decode endpoint computes as soon as they would be moved to it";
    families.gauge("kvlane_pd_break_even_tokens", help, break_even)?;
    let held = entries.iter().filter(|entry| entry.decode_inventory.is_some()).flat_map(|entry| {
        let decode = entry.service.endpoints.iter().filter(|endpoint| endpoint.role == Role::Decode);
        decode.map(|endpoint| {
            let labels = labels(entry, &[("ep_idx", &endpoint.shared.index.0.to_string())]);
            (labels, endpoint.shared.kv_blocks())
        })
    });
    families.gauge("kvlane_pd_decode_blocks", "Blocks that decode endpoints announced, for the bypass alone", held)?;
    type Gauge = fn(&Entry) -> u64;
    let gauges: [(&str, &str, Gauge); 2] = [
        ("kvlane_pd_in_flight", "Requests with two legs under way", |entry| u64::from(entry.shared.pd_total.count())),
        ("kvlane_pd_parked", "Requests that wait for a prefill endpoint", |entry| {
            let endpoints = entry.service.endpoints.iter();
            endpoints.map(|endpoint| u64::from(endpoint.shared.places.queue.count())).sum()
        }),
    ];
    for (name, help, read) in gauges {
        families.gauge(name, help, entries.iter().map(|entry| (labels(entry, &[]), read(entry))))?;
    }
    Ok(())
}

fn labels(entry: &Entry, more: &[(&'static str, &str)]) -> Labels {
    let model = entry.service.model.clone().unwrap_or_default();
    let mut labels = vec![("service", entry.id.0.to_string()), ("model", model)];
    labels.extend(more.iter().map(|(name, value)| (*name, (*value).to_owned())));
    labels
}

fn sum(entry: &Entry, read: impl Fn(&PdStats) -> u64) -> u64 {
    entry.shared.stats.iter().map(|stats| read(&stats.pd)).sum()
}

/// A histogram over all shards.
#[derive(Debug)]
struct Times {
    sum_seconds: f64,
    buckets: Vec<(f64, u64)>,
}

impl Times {
    fn of(entry: &Entry, read: fn(&PdStats) -> &Histogram) -> Self {
        let bounds = BUCKETS_MS.iter().map(|ms| *ms as f64 / 1000.0).chain([f64::MAX]);
        let buckets = bounds
            .enumerate()
            .map(|(place, bound)| (bound, sum(entry, |stats| read(stats).buckets[place].load(Ordering::Relaxed))));
        let sum_us = sum(entry, |stats| read(stats).sum_us.load(Ordering::Relaxed));
        Times { sum_seconds: sum_us as f64 / 1e6, buckets: buckets.collect() }
    }
}

impl EncodeMetric for Times {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> std::fmt::Result {
        let count = self.buckets.iter().map(|(_, count)| count).sum();
        encoder.encode_histogram::<NoLabelSet>(self.sum_seconds, count, &self.buckets, None)
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Histogram
    }
}
