//! Counters and states for Prometheus, read from the shards' and ingest's own memory when asked for.
//!
//! Names known from the reference keep their names; a `service` label stands beside `ep_idx`, without which two
//! rules' endpoints could not be told apart.

use std::sync::atomic::{AtomicU64, Ordering};

use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;
use shards::prompt::PrefixStats;
use shards::proxy::tier_name;
use shards::route::Tier;
use shards::service::{Endpoint, EndpointStats, MissReason, Role, ServiceStats};

use crate::supervise::{Control, Entry, ShardView, View};

use super::Context;
use super::answers::refusal;

pub(super) fn registry(control: Control) -> Registry {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(Source { control }));
    registry
}

/// A counter as it stands.
pub(super) fn read(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}

pub(super) async fn scrape(State(context): State<Context>) -> Response {
    if !context.shows_metrics.load(Ordering::Relaxed) {
        return refusal(StatusCode::SERVICE_UNAVAILABLE, "Prometheus option is disabled");
    }
    let mut text = String::new();
    match prometheus_client::encoding::text::encode(&mut text, &context.registry) {
        Ok(()) => ([(header::CONTENT_TYPE, "application/openmetrics-text; version=1.0.0; charset=utf-8")], text)
            .into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

#[derive(Debug)]
struct Source {
    control: Control,
}

/// Labels of one sample.
pub(crate) type Labels = Vec<(&'static str, String)>;

/// Families written one after the other, each with all its samples.
pub(crate) struct Families<'a>(DescriptorEncoder<'a>);

impl Families<'_> {
    /// One gauge without labels.
    fn single(&mut self, name: &str, help: &str, value: usize) -> std::fmt::Result {
        let encoder = self.0.encode_descriptor(name, help, None, MetricType::Gauge)?;
        ConstGauge::new(i64::try_from(value).unwrap_or(i64::MAX)).encode(encoder)
    }

    /// A family of counters; `_total` is appended to the name.
    pub(crate) fn counter(
        &mut self,
        name: &str,
        help: &str,
        samples: impl IntoIterator<Item = (Labels, u64)>,
    ) -> std::fmt::Result {
        let mut family = self.0.encode_descriptor(name, help, None, MetricType::Counter)?;
        for (labels, value) in samples {
            ConstCounter::new(value).encode(family.encode_family(&labels)?)?;
        }
        Ok(())
    }

    /// A family of metrics of one type.
    pub(crate) fn metrics(
        &mut self,
        name: &str,
        help: &str,
        kind: MetricType,
        samples: impl IntoIterator<Item = (Labels, impl EncodeMetric)>,
    ) -> std::fmt::Result {
        let mut family = self.0.encode_descriptor(name, help, None, kind)?;
        for (labels, metric) in samples {
            metric.encode(family.encode_family(&labels)?)?;
        }
        Ok(())
    }

    /// A family of gauges.
    pub(crate) fn gauge(
        &mut self,
        name: &str,
        help: &str,
        samples: impl IntoIterator<Item = (Labels, u64)>,
    ) -> std::fmt::Result {
        let mut family = self.0.encode_descriptor(name, help, None, MetricType::Gauge)?;
        for (labels, value) in samples {
            let value = i64::try_from(value).unwrap_or(i64::MAX);
            ConstGauge::new(value).encode(family.encode_family(&labels)?)?;
        }
        Ok(())
    }
}

impl Collector for Source {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> std::fmt::Result {
        let view = self.control.view();
        let mut families = Families(encoder);
        rules(&mut families, &view)?;
        endpoints(&mut families, &view, &self.control)?;
        services(&mut families, &view)?;
        super::metrics_pd::encode(&mut families, &view)?;
        cascade(&mut families, &view, &self.control)?;
        self.control.ingest.encode(&mut families)?;
        self.control.models.encode(&mut families)?;
        for_shards(&mut families, &view)
    }
}

fn rules(families: &mut Families<'_>, view: &View) -> std::fmt::Result {
    families.single("loxilb_lb_rules", "Rules in force", view.entries.len())?;
    let healthy = view.entries.iter().map(|entry| {
        let usable = entry.service.endpoints.iter().filter(|endpoint| endpoint.is_candidate()).count();
        (service(entry), usable as u64)
    });
    families.gauge("loxilb_healthy_endpoints", "Endpoints that requests may go to", healthy)
}

fn service(entry: &Entry) -> Labels {
    vec![("service", entry.id.0.to_string())]
}

/// The endpoints of all rules with their labels, those that left a rule excepted.
fn each_endpoint(view: &View) -> impl Iterator<Item = (Labels, &Endpoint)> {
    view.entries.iter().flat_map(|entry| {
        entry.service.endpoints.iter().filter(|endpoint| !endpoint.retired).map(|endpoint| {
            let mut labels = service(entry);
            labels.push(("ep_idx", endpoint.shared.index.0.to_string()));
            (labels, endpoint)
        })
    })
}

fn endpoints(families: &mut Families<'_>, view: &View, control: &Control) -> std::fmt::Result {
    type Read = fn(&EndpointStats) -> &AtomicU64;
    let counters: [(&str, &str, Read); 14] = [
        ("loxilb_pd_kv_tier15_hits", "Requests sent to the endpoint with the longest cached prefix", |s| &s.hits),
        ("loxilb_pd_kv_tier15_spills", "Hits that an overloaded winner gave to this endpoint", |s| &s.spills),
        ("loxilb_pd_kv_tier15_cold_seeds", "Hits given to this endpoint because it was cold", |s| &s.cold_seeds),
        ("kvlane_endpoint_requests", "Requests sent to the endpoint", |s| &s.requests),
        ("kvlane_endpoint_request_bytes", "Bytes of requests that the endpoint answered", |s| &s.bytes_in),
        ("kvlane_endpoint_answer_bytes", "Bytes of the endpoint's answers that were passed on", |s| &s.bytes_out),
        ("kvlane_endpoint_hit_tokens", "Prompt tokens predicted to hit at the endpoint", |s| &s.hit_tokens),
        ("kvlane_endpoint_connect_failures", "Connects refused or timed out", |s| &s.connect_failures),
        ("loxilb_pd_cb_flips", "Times the breaker opened", |s| &s.trips),
        ("kvlane_prediction_compared", "Answers that say what came from the cache", |s| &s.compared),
        ("kvlane_prediction_wrong", "Such answers with more than a block less than predicted", |s| &s.compared_wrong),
        ("kvlane_prediction_predicted_tokens", "Tokens predicted to hit, in such answers", |s| &s.compared_predicted),
        ("kvlane_prediction_cached_tokens", "Tokens that hit, in such answers", |s| &s.compared_cached),
        ("kvlane_prediction_missing_tokens", "Tokens predicted to hit that did not", |s| &s.compared_missing),
    ];
    for (name, help, read) in counters {
        let samples = each_endpoint(view).map(|(labels, endpoint)| {
            let sum = endpoint.shared.stats.iter().map(|stats| read(stats).load(Ordering::Relaxed)).sum();
            (labels, sum)
        });
        families.counter(name, help, samples)?;
    }
    let routed = each_endpoint(view).filter(|(_, endpoint)| endpoint.role != Role::Decode);
    let blocks = routed.map(|(labels, e)| (labels, e.shared.kv_blocks()));
    families.gauge("loxilb_pd_kv_blocks", "Blocks announced by the engine and not withdrawn", blocks)?;
    let info = each_endpoint(view).map(|(mut labels, endpoint)| {
        labels.push(("ep", endpoint.address.to_string()));
        (labels, 1)
    });
    families.gauge("loxilb_pd_ep_info", "Address of the endpoint", info)?;
    let up = each_endpoint(view).map(|(labels, endpoint)| (labels, u64::from(endpoint.is_candidate())));
    families.gauge("kvlane_endpoint_up", "Whether requests may go to the endpoint", up)?;
    let heals = each_endpoint(view).map(|(labels, e)| (labels, e.shared.heals.load(Ordering::Relaxed)));
    families.counter("loxilb_pd_cb_proactive_heal", "Times the breaker closed because probes were answered", heals)?;
    let trust = each_endpoint(view).map(|(labels, e)| (labels, u64::from(e.shared.trust.percent())));
    families.gauge("kvlane_endpoint_trust_percent", "How much of what the endpoint announces counts", trust)?;
    let conveys = each_endpoint(view).map(|(labels, e)| (labels, u64::from(e.shared.conveys_rank())));
    families.gauge("kvlane_endpoint_conveys_rank", "Whether a header chooses the rank at the engine", conveys)?;
    let faults = view.entries.iter().flat_map(|entry| {
        let of_endpoint = move |endpoint: &Endpoint| {
            let index = endpoint.shared.index;
            control.findings.of((entry.id, index)).into_iter().map(move |finding| {
                let mut labels = service(entry);
                labels.push(("ep_idx", index.0.to_string()));
                labels.push(("leg", finding.leg.name().to_owned()));
                (labels, 1)
            })
        };
        entry.service.endpoints.iter().filter(|endpoint| !endpoint.retired).flat_map(of_endpoint)
    });
    families.gauge("kvlane_parity_endpoint_fault", "What is wrong with the endpoint as a whole", faults)?;
    let flight =
        each_endpoint(view).map(|(labels, e)| (labels, u64::from(control.loads.total(e.shared.slot).requests())));
    families.gauge("kvlane_endpoint_in_flight", "Requests under way at the endpoint", flight)
}

fn services(families: &mut Families<'_>, view: &View) -> std::fmt::Result {
    let sum = |entry: &Entry, read: &dyn Fn(&ServiceStats) -> &AtomicU64| -> u64 {
        entry.shared.stats.iter().map(|stats| read(stats).load(Ordering::Relaxed)).sum()
    };
    let misses = view.entries.iter().flat_map(|entry| {
        MissReason::ALL.into_iter().map(move |reason| {
            let mut labels = service(entry);
            labels.push(("reason", reason.name().to_owned()));
            (labels, sum(entry, &|stats| &stats.misses[reason as usize]))
        })
    });
    families.counter("loxilb_pd_kv_tier15_miss_reason", "Requests that the KV tier did not decide", misses)?;
    let fallthrough = view.entries.iter().filter(|entry| entry.service.kv.is_some()).map(|entry| {
        let missed = MissReason::ALL.into_iter().map(|reason| sum(entry, &|stats| &stats.misses[reason as usize]));
        (service(entry), missed.sum())
    });
    families.counter("loxilb_pd_kv_tier15_fallthrough", "Requests that the KV tier did not decide", fallthrough)?;
    let responses = view.entries.iter().flat_map(|entry| {
        ["none", "1xx", "2xx", "3xx", "4xx", "5xx"].into_iter().enumerate().map(move |(class, name)| {
            let mut labels = service(entry);
            labels.push(("status_class", name.to_owned()));
            (labels, sum(entry, &|stats| &stats.responses[class]))
        })
    });
    families.counter("kvlane_responses", "Answers of endpoints by status class", responses)?;
    let fired = view.entries.iter().map(|entry| {
        let labels = vec![("service_id", entry.id.0.to_string())];
        (labels, entry.shared.zero_hits.fired.load(Ordering::Relaxed))
    });
    families.counter("loxilb_pd_kv_zero_hit_watchdog", "Runs of repeated prompts that hit no cache", fired)?;
    type Read = fn(&ServiceStats) -> &AtomicU64;
    let counters: [(&str, &str, Read); 8] = [
        ("kvlane_no_healthy_backend", "Requests refused because no endpoint was usable", |s| &s.no_healthy_backend),
        ("loxilb_pd_connect_failover", "Requests that moved to another endpoint", |s| &s.connect_failovers),
        ("kvlane_connect_failovers", "Requests that moved to another endpoint", |s| &s.connect_failovers),
        ("kvlane_broken_answers", "Answers that broke after their first byte", |s| &s.broken_answers),
        ("kvlane_client_gone", "Requests whose client left early", |s| &s.client_gone),
        ("kvlane_claim_decisions", "Requests sent to where their beginning was about to be stored", |s| &s.claims),
        ("kvlane_regret_tokens", "Tokens that would have hit at the best candidate", |s| &s.regret_tokens),
        ("kvlane_oracle_gap_tokens", "Tokens that some endpoint holds and the chosen one does not", |s| {
            &s.oracle_gap_tokens
        }),
    ];
    for (name, help, read) in counters {
        families.counter(name, help, view.entries.iter().map(|entry| (service(entry), sum(entry, &read))))?;
    }
    Ok(())
}

/// Which stage of the cascade decided, and what the stages remember.
fn cascade(families: &mut Families<'_>, view: &View, control: &Control) -> std::fmt::Result {
    let sum = |entry: &Entry, read: &dyn Fn(&ServiceStats) -> &AtomicU64| -> u64 {
        entry.shared.stats.iter().map(|stats| read(stats).load(Ordering::Relaxed)).sum()
    };
    let with_model = |entry: &Entry| {
        let mut labels = service(entry);
        labels.push(("model", entry.rule.key.model.clone()));
        labels
    };
    let tiers = view.entries.iter().flat_map(|entry| {
        Tier::ALL.into_iter().map(move |tier| {
            let mut labels = with_model(entry);
            labels.push(("tier", tier_name(tier).to_owned()));
            (labels, sum(entry, &|stats| &stats.tiers[tier as usize]))
        })
    });
    families.counter("loxilb_ai_pd_tier_selected", "Requests by the stage of the cascade that decided", tiers)?;
    let sessions =
        view.entries.iter().map(|entry| (with_model(entry), sum(entry, &|stats| &stats.tiers[Tier::Session as usize])));
    families.counter("loxilb_ai_pd_session_hits", "Requests that went where their session was", sessions)?;
    families.single(
        "loxilb_pd_sessions_active",
        "Sessions whose endpoint is remembered",
        control.affinity.sessions() as usize,
    )?;
    let (dropped, evicted) = (&control.affinity.dropped, &control.affinity.evicted);
    for (name, help, value) in [
        ("kvlane_session_pins_dropped", "Pins of sessions that only their own shard heard of", dropped),
        ("kvlane_sessions_evicted", "Sessions forgotten before their time, for want of room", evicted),
    ] {
        families.counter(name, help, [(Labels::new(), value.load(Ordering::Relaxed))])?;
    }
    let tries = view.entries.iter().map(|entry| (service(entry), sum(entry, &|stats| &stats.trie_nodes)));
    families.gauge("loxilb_pd_trie_nodes", "Nodes of the trees of texts, all shards together", tries)?;
    let engines = view.entries.iter().map(|entry| {
        let mut labels = service(entry);
        labels.push(("engine", entry.rule.engine.name().to_owned()));
        (labels, 1)
    });
    families.gauge("loxilb_ai_engine_info", "Kind of engine behind the rule", engines)?;
    let queued = each_endpoint(view).filter_map(|(labels, e)| Some((labels, u64::from(e.shared.engine.queued()?))));
    families.gauge("kvlane_engine_queued_requests", "Requests waiting in the engine, by its own metrics", queued)?;
    let blocks = each_endpoint(view).filter_map(|(labels, e)| Some((labels, u64::from(e.shared.cache_blocks()?))));
    families.gauge("kvlane_engine_cache_blocks", "Blocks of the engine's cache, by its own metrics", blocks)
}

fn for_shards(families: &mut Families<'_>, view: &View) -> std::fmt::Result {
    type Read = fn(&ShardView) -> u64;
    let label = |shard: &ShardView| vec![("shard", shard.id().0.to_string())];
    let info = view.shards.iter().map(|shard| {
        let mut labels = label(shard);
        labels.push(("core", shard.core.to_string()));
        labels.push(("driver", shard.driver().to_owned()));
        (labels, 1)
    });
    families.gauge("kvlane_shard_info", "Core and driver of the shard", info)?;
    let gauges: [(&str, &str, Read); 3] = [
        ("kvlane_shard_connections", "Client connections open", |s| s.status.connections_open.load(Ordering::Relaxed)),
        ("kvlane_shard_gap_max_microseconds", "Longest time between two visits to the driver", |s| {
            s.status.meter.gap_max_ns.load(Ordering::Relaxed) / 1000
        }),
        ("kvlane_shard_gap_p999_microseconds", "Time between two visits to the driver, 99.9 % of all below", |s| {
            s.status.meter.gap_us_at(0.999)
        }),
    ];
    for (name, help, read) in gauges {
        families.gauge(name, help, view.shards.iter().map(|shard| (label(shard), read(shard))))?;
    }
    let counters: [(&str, &str, Read); 3] = [
        ("kvlane_shard_visits", "Visits to the driver", |s| s.status.meter.visits.load(Ordering::Relaxed)),
        ("kvlane_shard_connections_accepted", "Client connections accepted", |s| {
            s.status.connections_accepted.load(Ordering::Relaxed)
        }),
        ("kvlane_shard_panics", "Connections ended by a panic", |s| s.status.meter.panics.load(Ordering::Relaxed)),
    ];
    for (name, help, read) in counters {
        families.counter(name, help, view.shards.iter().map(|shard| (label(shard), read(shard))))?;
    }
    prompts(families, view)
}

/// What shards remember of prompts, and what came of it.
fn prompts(families: &mut Families<'_>, view: &View) -> std::fmt::Result {
    type Read = fn(&PrefixStats) -> u64;
    let of =
        |shard: &ShardView, read: Read| (vec![("shard", shard.id().0.to_string())], read(&shard.status.prompts.load()));
    let gauges: [(&str, &str, Read); 2] = [
        ("kvlane_prompt_cache_bytes", "Bytes held of prompts, bounded by limits.prompt_cache_bytes", |s| s.bytes),
        ("kvlane_prompt_cache_prompts", "Prompts held", |s| s.prompts),
    ];
    for (name, help, read) in gauges {
        families.gauge(name, help, view.shards.iter().map(|shard| of(shard, read)))?;
    }
    let counters: [(&str, &str, Read); 7] = [
        ("kvlane_prompt_cache_hits", "Prompts whose begin was remembered", |s| s.hits),
        ("kvlane_prompt_cache_misses", "Prompts of which nothing was remembered", |s| s.misses),
        ("kvlane_prompt_cache_hit_bytes", "Bytes of prompts that were remembered", |s| s.hit_bytes),
        ("kvlane_prompt_cache_evictions", "Prompts dropped to stay within the bound", |s| s.evictions),
        ("kvlane_prompt_regrown", "Chats rendered from their end only", |s| s.regrown),
        ("kvlane_prompt_regrown_checked", "Such chats compared with the whole render", |s| s.checked),
        ("kvlane_prompt_regrown_differences", "Comparisons that failed; each ends it for a template", |s| {
            s.differences
        }),
    ];
    for (name, help, read) in counters {
        families.counter(name, help, view.shards.iter().map(|shard| of(shard, read)))?;
    }
    let shortened: [(&str, &str, Read); 2] = [
        ("kvlane_prompt_keys_ended", "Prompts whose keys end before the prompt does, by reason", |s| s.unbroken),
        ("kvlane_prompt_keys_ended_bytes", "Bytes of such prompts without keys, by reason", |s| s.unbroken_bytes),
    ];
    for (name, help, read) in shortened {
        let samples = view.shards.iter().map(|shard| {
            let (mut labels, value) = of(shard, read);
            labels.push(("reason", "no_cut".to_owned()));
            (labels, value)
        });
        families.counter(name, help, samples)?;
    }
    Ok(())
}
