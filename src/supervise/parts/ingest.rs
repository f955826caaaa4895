//! Ingest as the supervisor handles it.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use shards::block::{Contract, FIXED_SEED};
use shards::ids::{Rank, ServiceId};
use shards::inventory::Writer;
use shards::load::LoadTable;
use shards::service::{Engine, Role};
use tracing::error;

use crate::admin::{Families, Labels};
use crate::config::Config;
use crate::cores::Plan;
use crate::discovery::ServiceFacts;
use crate::ingest::{
    Believed, DrainFrom, DrainStatus, EndpointSources, Ingest, IngestOptions, Mode, Pool, RankSource, Replay,
    ServiceSources, StateOptions, StreamName, StreamStatus, TableId,
};
use crate::rules::{EventPlace, EventSource, RuleEndpoint, contract};
use crate::supervise::Entry;

use super::PartError;

/// The way to ingest: changes of subscriptions, and the state of event streams.
#[derive(Clone, Debug)]
pub struct IngestPart(Arc<Ingest>);

impl IngestPart {
    pub(super) fn start(config: &Config, plan: &Plan, loads: &Arc<LoadTable>) -> Result<Self, PartError> {
        let options = IngestOptions {
            cores: plan.ingest.clone(),
            max_blocks_per_endpoint: config.kv_defaults.max_blocks as usize,
            state: config
                .state_directory
                .clone()
                .map(|directory| StateOptions { directory, period: config.state_period }),
            ..IngestOptions::new(Arc::clone(loads))
        };
        Ok(IngestPart(Arc::new(Ingest::start(options).map_err(PartError::IngestStart)?)))
    }

    /// Stops ingest, and waits until what engines hold is written.
    pub(super) async fn stop(self) {
        // It joins threads; a second signal is to be heard meanwhile.
        if let Err(error) = tokio::task::spawn_blocking(move || self.0.stop()).await {
            error!(%error, "ingest did not stop");
        }
    }

    pub(crate) fn add(&self, entry: &Entry, pool: Pool, writer: Writer) {
        report(self.0.add_service(sources(entry, pool), writer));
    }

    pub(crate) fn update(&self, entry: &Entry, pool: Pool) {
        report(self.0.update_service(sources(entry, pool)));
    }

    pub(crate) fn remove(&self, service: ServiceId, pool: Pool) {
        report(self.0.remove_service(TableId { service, pool }));
    }

    /// The sources of all tables that a rule in force has: its engines have moved, or say something else of themselves.
    pub(crate) fn update_all(&self, entry: &Entry) {
        entry.pools().for_each(|pool| self.update(entry, pool));
    }

    /// A rule is gone.
    pub(crate) fn remove_all(&self, entry: &Entry) {
        entry.pools().for_each(|pool| self.remove(entry.id, pool));
    }

    pub(crate) fn keep_files(&self, keep: bool) {
        self.0.keep_files(keep);
    }

    pub(crate) fn set_load_slots(&self, slots: usize) {
        self.0.set_load_slots(slots);
    }

    /// State of every event stream.
    pub(crate) fn streams(&self) -> Vec<StreamStatus> {
        self.0.status()
    }

    /// State of every drain.
    pub(crate) fn drains(&self) -> Vec<DrainStatus> {
        self.0.drains()
    }

    /// State of every event stream, for the API.
    #[must_use]
    pub fn report(&self) -> Vec<Value> {
        self.0.status().iter().map(show).collect()
    }

    /// State of every event stream, for Prometheus.
    pub(crate) fn encode(&self, families: &mut Families<'_>) -> std::fmt::Result {
        type Read = fn(&StreamStatus) -> u64;
        let streams = self.0.status();
        let gauges: [(&str, &str, Read); 5] = [
            ("loxilb_kv_subscriber_connected", "Whether a publisher is connected", |s| u64::from(s.connected)),
            ("loxilb_kv_inventory_fresh", "Whether the rank's blocks count for routing", |s| u64::from(s.eligible)),
            (
                "kvlane_kv_degraded",
                "Whether some of the rank's blocks are unproven after a restart of the gateway",
                |s| u64::from(s.degraded),
            ),
            ("loxilb_kv_last_event_timestamp_seconds", "When the last batch was applied", |s| {
                s.last_event_ms.unwrap_or(0) / 1000
            }),
            (
                "kvlane_kv_lag_microseconds",
                "Age of the last live batch when it was applied, by the engine's clock",
                |s| s.lag_us,
            ),
        ];
        for (name, help, read) in gauges {
            families.gauge(name, help, streams.iter().map(|stream| (labels(stream), read(stream))))?;
        }
        let counters: [(&str, &str, Read); 8] = [
            ("loxilb_kv_subscriber_reconnect", "Connections after the first", |s| s.reconnects),
            ("loxilb_kv_inv_cap_evictions", "Blocks withdrawn because the endpoint's bound was reached", |s| s.evicted),
            ("kvlane_kv_events", "Events understood", |s| s.events),
            ("kvlane_kv_gaps", "Gaps in the sequence of batches", |s| s.gaps),
            ("kvlane_kv_replays", "Replays that ran to their end", |s| s.replays),
            ("kvlane_kv_restarts", "Engine restarts seen in the sequence", |s| s.restarts),
            ("kvlane_kv_clears", "Times the rank was emptied", |s| s.clears),
            ("kvlane_kv_block_size_mismatches", "Stores whose block size is not the rule's", |s| {
                s.block_size_mismatches
            }),
        ];
        for (name, help, read) in counters {
            families.counter(name, help, streams.iter().map(|stream| (labels(stream), read(stream))))?;
        }
        encode_state(families, &streams)?;
        encode_parity(families, &streams)?;
        encode_use(families, &streams, &self.0.drains())?;
        encode_drains(families, &self.0.drains())?;
        let rejects = streams.iter().flat_map(|stream| {
            stream.rejects.iter().map(move |(why, count)| {
                let mut labels = labels(stream);
                labels.push(("reason", why.name().to_owned()));
                (labels, *count)
            })
        });
        families.counter("loxilb_kv_wire_reject", "What of the engine's messages was not taken", rejects)
    }
}

/// What was remembered over a restart, and what engines' `usage` said of it.
fn encode_state(families: &mut Families<'_>, streams: &[StreamStatus]) -> std::fmt::Result {
    type Read = fn(&StreamStatus) -> u64;
    let started = streams.iter().filter_map(|stream| {
        let mut labels = labels(stream);
        labels.push(("with", stream.started?.name().to_owned()));
        Some((labels, 1))
    });
    families.gauge("kvlane_kv_started", "What the rank's inventory began with", started)?;
    let counters: [(&str, &str, Read); 5] = [
        ("kvlane_kv_restored_blocks", "Blocks taken up from state files", |s| s.restored),
        ("kvlane_kv_withdrawn_blocks", "Unproven blocks that the engine's usage denied", |s| s.withdrawn),
        ("kvlane_kv_adopted_blocks", "Blocks taken in because the engine's usage reported them cached", |s| s.adopted),
        ("kvlane_kv_state_writes", "State files written", |s| s.state_writes),
        ("kvlane_kv_state_failures", "State files not written, or not taken up", |s| s.state_failures),
    ];
    for (name, help, read) in counters {
        families.counter(name, help, streams.iter().map(|stream| (labels(stream), read(stream))))?;
    }
    Ok(())
}

/// Parity by use of every endpoint, by whichever way its events come.
fn encode_use(families: &mut Families<'_>, streams: &[StreamStatus], drains: &[DrainStatus]) -> std::fmt::Result {
    // The counts are the endpoint's: its first rank tells them.
    let first = streams.iter().filter(|stream| stream.name.rank == Rank(0));
    let endpoints = first.map(|stream| (&stream.name, stream.by_use));
    let endpoints: Vec<_> = endpoints.chain(drains.iter().map(|drain| (&drain.name, drain.by_use))).collect();
    let fulfilled = endpoints.iter().map(|(name, by_use)| (labels_of(name), by_use.fulfilled));
    families.counter("kvlane_parity_predictions_fulfilled", "Prompts whose blocks the engine held", fulfilled)?;
    let missed = endpoints.iter().map(|(name, by_use)| (labels_of(name), by_use.missed));
    families.counter("kvlane_parity_predictions_missed", "Prompts whose blocks the engine did not hold", missed)?;
    let alarms = endpoints.iter().filter_map(|(name, by_use)| {
        let mut labels = labels_of(name);
        labels.push(("leg", by_use.alarm?.name().to_owned()));
        Some((labels, 1))
    });
    families.gauge("kvlane_parity_alarm", "What a run of missed predictions points to", alarms)
}

/// The verdicts on the engines' keys: one series per rank for its verdict, and one per leg at fault.
fn encode_parity(families: &mut Families<'_>, streams: &[StreamStatus]) -> std::fmt::Result {
    let judged = || streams.iter().filter_map(|stream| Some((stream, stream.finding.as_ref()?)));
    let with = |stream: &StreamStatus, name: &'static str, value: &str| {
        let mut labels = labels(stream);
        labels.push((name, value.to_owned()));
        (labels, 1)
    };
    let verdicts = judged().map(|(stream, finding)| with(stream, "verdict", finding.verdict.name()));
    families.gauge("kvlane_parity_verdict", "How the rank's blocks are keyed", verdicts)?;
    let faults = judged().flat_map(|(stream, finding)| finding.faults.iter().map(move |leg| (stream, leg)));
    let faults = faults.map(|(stream, leg)| with(stream, "leg", leg.name()));
    families.gauge("kvlane_parity_fault", "What differs between the rule and the engine", faults)?;
    let orphans = streams.iter().map(|stream| (labels(stream), stream.orphans));
    families.counter("kvlane_parity_orphans", "Blocks whose beginning was never announced to us", orphans)
}

/// The drains of TensorRT-LLM engines.
fn encode_drains(families: &mut Families<'_>, drains: &[DrainStatus]) -> std::fmt::Result {
    type Read = fn(&DrainStatus) -> u64;
    let labels = |drain: &DrainStatus| -> Labels {
        vec![
            ("service", drain.name.service.0.to_string()),
            ("ep_idx", drain.name.endpoint.0.to_string()),
            ("ep", drain.name.label.clone()),
        ]
    };
    let phases = drains.iter().map(|drain| {
        let mut labels = labels(drain);
        labels.push(("phase", drain.phase.name().to_owned()));
        (labels, 1)
    });
    families.gauge("kvlane_drain_phase", "Where the drain of the engine's events stands", phases)?;
    let gauges: [(&str, &str, Read); 2] = [
        (
            "kvlane_drain_second_drainer",
            "Whether another consumer takes the engine's events (1: suspected, 2: detected)",
            |d| d.second_drainer() as u64,
        ),
        ("kvlane_drain_last_poll_timestamp_seconds", "When the engine last answered the drain", |d| {
            d.last_poll_ms.unwrap_or(0) / 1000
        }),
    ];
    for (name, help, read) in gauges {
        families.gauge(name, help, drains.iter().map(|drain| (labels(drain), read(drain))))?;
    }
    let counters: [(&str, &str, Read); 6] = [
        ("kvlane_drain_answers", "Answers with a list of events", |d| d.answers),
        ("kvlane_drain_answers_lost", "Answers that never arrived whole", |d| d.answers_lost),
        ("kvlane_drain_errors", "Answers of another kind", |d| d.errors),
        ("kvlane_drain_events", "Events understood", |d| d.events),
        ("kvlane_drain_lost", "Events lost, as their numbers say", |d| d.lost),
        ("kvlane_drain_ownership_faults", "Losses that only a second consumer explains", |d| d.ownership_faults),
    ];
    for (name, help, read) in counters {
        families.counter(name, help, drains.iter().map(|drain| (labels(drain), read(drain))))?;
    }
    Ok(())
}

fn report(result: Result<(), crate::ingest::Error>) {
    if let Err(error) = result {
        error!(%error, "ingest");
    }
}

/// The event sources of a rule's endpoints that one table is of; those whose name has no address stay, without any for now.
pub(in crate::supervise) fn sources(entry: &Entry, pool: Pool) -> ServiceSources {
    let ranks = entry.rule.kv.as_ref().map_or(0, |kv| kv.ranks);
    let endpoints = entry.places.iter().filter_map(|place| {
        // What a decode endpoint holds is nothing that a prompt is routed by.
        let of_pool = |endpoint: &&RuleEndpoint| (endpoint.role == Role::Decode) == (pool == Pool::Decode);
        let endpoint = Some(&entry.rule.endpoints[place.in_rule?]).filter(of_pool)?;
        let reached = endpoint.events.as_ref().zip(place.address);
        let ranks = reached.iter().flat_map(|(events, at)| (0..ranks).map(|rank| rank_source(events, *at, rank)));
        Some(EndpointSources {
            index: place.shared.index,
            shared: Arc::clone(&place.shared),
            label: endpoint.to_string(),
            ranks: ranks.collect(),
            // An engine that pushes its events hands out none.
            drain: place
                .address
                .filter(|_| endpoint.events.is_none() && pool == Pool::Prompts)
                .and_then(|address| drain(entry, address)),
        })
    });
    ServiceSources {
        id: entry.id,
        pool,
        engine: entry.rule.engine,
        block_tokens: entry.rule.kv.as_ref().map_or(0, |kv| kv.block_tokens),
        weights: entry.rule.kv.as_ref().map(|kv| kv.weights).unwrap_or_default(),
        believed: believed(entry).map(Arc::new),
        endpoints: endpoints.collect(),
    }
}

/// The drain of a TensorRT-LLM engine: its serving port tells its events, each once.
fn drain(entry: &Entry, address: SocketAddr) -> Option<DrainFrom> {
    let poll = entry.rule.kv.as_ref().filter(|_| entry.rule.engine == Engine::Trtllm)?.drain_poll;
    let [poll_min, poll_max] = [poll.min_ms, poll.max_ms].map(|ms| Duration::from_millis(ms.into()));
    Some(DrainFrom { address, poll_min, poll_max, token: entry.rule.engine_token.clone() })
}

/// What a rule says of its engines' keys; none for engines whose keys are not looked at. Releases are left out of it:
/// they change only how extras are keyed, and a source whose belief changes is read anew.
fn believed(entry: &Entry) -> Option<Believed> {
    let kv = entry.rule.kv.as_ref()?;
    let facts = ServiceFacts { release: None, ..ServiceFacts::clone(&entry.facts) };
    match contract(kv, &facts) {
        Contract::Vllm { none_hash, tagging, .. } => Some(Believed::Vllm {
            algorithm: none_hash.algorithm(),
            algorithm_given: kv.algo_given,
            seed: kv.seed.clone().unwrap_or_else(|| FIXED_SEED.to_owned()),
            tagging,
        }),
        Contract::Sglang(contract) => Some(Believed::Sglang(contract)),
        Contract::TrtllmTokens => Some(Believed::Tokens),
        Contract::Derived | Contract::TrtllmV1 => None,
    }
}

fn rank_source(events: &EventSource, address: SocketAddr, rank: u8) -> RankSource {
    // The rule was refused if the highest rank's port were beyond 65,535.
    let at = |base: SocketAddr, port: u16| {
        format!("tcp://{}", SocketAddr::new(base.ip(), port.saturating_add(u16::from(rank))))
    };
    RankSource {
        rank: Rank(rank),
        mode: match events.live {
            EventPlace::Connect(port) => Mode::Connect(at(address, port)),
            EventPlace::Bind(bound) => Mode::Bind(at(bound, bound.port())),
        },
        replay: events.replay_port.map(|port| at(address, port)),
    }
}

fn labels(stream: &StreamStatus) -> Labels {
    labels_of(&stream.name)
}

fn labels_of(name: &StreamName) -> Labels {
    vec![
        ("service", name.service.0.to_string()),
        ("ep_idx", name.endpoint.0.to_string()),
        ("ep", name.label.clone()),
        ("rank", name.rank.0.to_string()),
    ]
}

fn show(stream: &StreamStatus) -> Value {
    let rejects: serde_json::Map<String, Value> =
        stream.rejects.iter().map(|(why, count)| (why.name().to_owned(), json!(count))).collect();
    json!({
        "service_id": stream.name.service.0,
        "ep_idx": stream.name.endpoint.0,
        "endpoint": stream.name.label,
        "rank": stream.name.rank.0,
        "address": stream.name.address,
        "connected": stream.connected,
        "eligible": stream.eligible,
        "last_seq": stream.last_seq,
        "events": stream.events,
        "blocks_stored": stream.blocks_stored,
        "blocks_removed": stream.blocks_removed,
        "reconnects": stream.reconnects,
        "gaps": stream.gaps,
        "restarts": stream.restarts,
        "replays": stream.replays,
        "clears": stream.clears,
        "evicted": stream.evicted,
        "rejects": rejects,
        "engine_block_tokens": stream.engine_block_tokens,
        "last_event_ms": stream.last_event_ms,
        "started": stream.started.map(|started| started.name()),
        "degraded": stream.degraded,
        "restored": stream.restored,
        "withdrawn_by_usage": stream.withdrawn,
        "adopted_by_usage": stream.adopted,
        "state_writes": stream.state_writes,
        "state_failures": stream.state_failures,
        "lag_us": stream.lag_us,
        "replay": match stream.replay {
            Replay::Untried => "untried",
            Replay::Works => "works",
            Replay::Missing => "missing",
        },
    })
}
