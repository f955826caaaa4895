//! Questions to the management API of a running gateway, and the keys of a prompt to ask about.

use std::sync::Arc;

use serde_json::Value;
use shards::ids::BlockKey;
use shards::prompt::{Api, Job, Keying, Model, Rendering, Step};
use shards::service::MissReason;

use super::manage::{Client, Credentials};
use crate::rules::Rule;

/// A gateway's management API.
pub(super) struct Gateway {
    /// As it was given.
    pub url: String,
    client: Client,
}

/// What a gateway says of a rule.
pub(super) struct Told {
    /// The rule's number there.
    pub service: u64,
    /// Whether each endpoint is up.
    pub up: Vec<bool>,
}

impl Gateway {
    /// A gateway by its address: `http://HOST:PORT`, `https://HOST:PORT`, or without a scheme.
    pub fn at(url: &str, credentials: &Credentials) -> Result<Self, String> {
        let client = Client::at(url, credentials).map_err(|why| why.to_string())?;
        Ok(Gateway { url: url.to_owned(), client })
    }

    /// Finds a rule by what tells it from others.
    pub fn rule(&self, rule: &Rule) -> Result<Told, String> {
        let answer = self.get("/config/loadbalancer/all")?;
        let text = |service: &Value, name: &str| service[name].as_str().unwrap_or_default().to_owned();
        let same = |service: &Value| {
            text(service, "externalIP") == rule.key.ip.to_string()
                && service["port"] == rule.key.port
                && text(service, "host") == rule.key.host
                && text(service, "path_prefix") == rule.key.path_prefix
                && text(service, "model_name") == rule.key.model
        };
        let rules = answer["lbAttr"].as_array().map(Vec::as_slice).unwrap_or_default();
        let found = rules.iter().find(|found| same(&found["serviceArguments"]));
        let found = found.ok_or_else(|| format!("{}: the gateway has no rule {}", self.url, rule.key))?;
        let endpoints = found["endpoints"].as_array().map(Vec::as_slice).unwrap_or_default();
        let service = found["serviceArguments"]["service_id"].as_u64();
        Ok(Told {
            service: service.ok_or_else(|| format!("{}: the rule has no number", self.url))?,
            up: endpoints.iter().map(|endpoint| endpoint["state"] == "active").collect(),
        })
    }

    /// The keys that an endpoint holds.
    pub fn keys(&self, service: u64, endpoint: usize) -> Result<Vec<u64>, String> {
        let answer = self.get(&format!("/config/ai/kv/inventory?service_id={service}&ep_idx={endpoint}"))?;
        let blocks = answer["blocks"].as_array().map(Vec::as_slice).unwrap_or_default();
        Ok(blocks.iter().filter_map(|block| block["hash_uint64"].as_u64()).collect())
    }

    /// Asks for a path below the API's base.
    pub fn get(&self, path: &str) -> Result<Value, String> {
        self.client.ask("GET", path, None).map_err(|why| format!("{}{path}: {why}", self.url))
    }
}

/// All keys of a prompt.
pub(super) fn keys_of(
    api: Api,
    body: &[u8],
    model: &Arc<Model>,
    rendering: Rendering<'_>,
    keying: Keying<'_>,
) -> Result<Vec<BlockKey>, MissReason> {
    let mut job = Job::new(api, body, model, rendering, keying)?;
    while job.step()? == Step::More {}
    Ok(job.keys().to_vec())
}
