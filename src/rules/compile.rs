//! A checked rule into the service that shards route with.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use shards::ids::ServiceId;
use shards::inventory::ReaderFactory;
use shards::service::{Endpoint, EndpointShared, KvExact, Role, Service, ServiceShared, Target};

use crate::discovery::ServiceFacts;

use super::{Host, KvRule, Rule, contract};

/// One place of a service's endpoint list: in use by the rule, or kept for an endpoint that left it.
#[derive(Clone, Debug)]
pub struct Place {
    /// Where requests go; none while a name has not been resolved.
    pub address: Option<SocketAddr>,
    /// State that outlives compilations.
    pub shared: Arc<EndpointShared>,
    /// Which endpoint of the rule stands here; none = retired.
    pub in_rule: Option<usize>,
}

/// The reading ends of a rule's tables of blocks.
#[derive(Clone, Debug, Default)]
pub struct Inventories {
    /// Of the endpoints that compute prompts; there exactly when the rule routes by KV cache.
    pub prompts: Option<ReaderFactory>,
    /// Of decode endpoints, where the rule looks at them.
    pub decode: Option<ReaderFactory>,
}

/// Compiles a rule. `places` is by endpoint index; `facts` is what the engines say of themselves.
#[must_use]
pub fn compile(
    rule: &Rule,
    id: ServiceId,
    places: &[Place],
    shared: Arc<ServiceShared>,
    inventories: Inventories,
    facts: &ServiceFacts,
) -> Service {
    let Inventories { prompts, decode } = inventories;
    let some = |text: &String| (!text.is_empty()).then(|| text.clone());
    let service = Service {
        id,
        name: rule.name.clone(),
        listen: rule.key.listen(),
        host: some(&rule.key.host),
        path: rule.key.path(),
        model: some(&rule.key.model),
        select: rule.select,
        hashing: rule.hashing,
        ring: None,
        sessions: rule.sessions.clone(),
        pd: rule.pd.clone(),
        engine: rule.engine,
        proxy: rule.proxy.clone(),
        kv: rule.kv.as_ref().zip(prompts).map(|(kv, inventory)| compile_kv(kv, inventory, decode, facts)),
        endpoints: places.iter().map(|place| compile_place(rule, place)).collect::<Vec<_>>().into(),
        shared,
    };
    service.with_ring()
}

fn compile_kv(
    kv: &KvRule,
    inventory: ReaderFactory,
    decode_inventory: Option<ReaderFactory>,
    facts: &ServiceFacts,
) -> KvExact {
    KvExact {
        block_tokens: kv.block_tokens,
        ranks: kv.ranks,
        contract: contract(kv, facts),
        algo_given: kv.algo_given,
        // In this order: the rule wins over what engines list.
        adapters: facts
            .adapters
            .iter()
            .chain(&kv.adapters)
            .map(|(n, adapter)| (n.as_str().into(), adapter.clone()))
            .collect(),
        only_model: facts.only_model().map(Into::into),
        chat_template: kv.chat_template.as_ref().map(|template| Arc::clone(&template.text)),
        chat_template_kwargs: kv.prompts.template_kwargs.clone(),
        add_bos: kv.prompts.add_bos,
        engine_render: kv.prompts.engine_render,
        send_ids: kv.prompts.send_ids,
        blend: kv.blend,
        throughput: kv.throughput,
        load_penalty: kv.load_penalty,
        capacity_sum_milli: kv.capacity_sum_milli,
        min_match_tokens: kv.min_match_tokens,
        spill_relief: kv.spill_relief,
        mean_load_factor: kv.mean_load_factor,
        seed_every: kv.seed_every,
        seed_min_blocks: kv.seed_min_blocks,
        zero_hit_every: kv.zero_hit_every,
        claim_for: Duration::from_millis(kv.claim_ms.into()),
        other_forms: facts.other_forms(),
        weights: kv.weights,
        inventory,
        decode_inventory,
    }
}

fn compile_place(rule: &Rule, place: &Place) -> Endpoint {
    let endpoint = place.in_rule.map(|at| &rule.endpoints[at]);
    let target = Target {
        // A name without an address has weight 0 below, so that nothing is sent to this placeholder.
        address: place.address.unwrap_or(SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0)),
        dns_name: endpoint.and_then(|endpoint| match &endpoint.host {
            Host::Ip(_) => None,
            Host::Name(name) => Some(name.clone()),
        }),
        nixl_port: endpoint.map_or(0, |endpoint| endpoint.nixl_port),
        nixl_engine_id: endpoint
            .map(|endpoint| endpoint.nixl_engine_id.as_str())
            .filter(|id| !id.is_empty())
            .map(Into::into),
    };
    Endpoint {
        weight: endpoint.filter(|_| place.address.is_some()).map_or(0, |endpoint| endpoint.weight),
        backup: endpoint.is_some_and(|endpoint| endpoint.backup),
        retired: endpoint.is_none(),
        role: endpoint.map_or(Role::Normal, |endpoint| endpoint.role),
        ..Endpoint::of(target, Arc::clone(&place.shared))
    }
}
