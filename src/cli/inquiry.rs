//! Questions to the management API of a running gateway, and the keys of a prompt to ask about.

use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use shards::ids::BlockKey;
use shards::prompt::{Api, Job, Keying, Model, Rendering, Step};
use shards::service::MissReason;

use crate::discovery::Call;
use crate::rules::Rule;

/// Longest answer, bytes: an inventory of several million keys. A longer one is an error.
const ANSWER_BYTES_MAX: usize = 512 << 20;
/// Longest wait for one answer.
const TIMEOUT: Duration = Duration::from_secs(30);

/// A gateway's management API.
pub(super) struct Gateway {
    /// As it was given.
    pub url: String,
    host: String,
}

/// What a gateway says of a rule.
pub(super) struct Told {
    /// The rule's number there.
    pub service: u64,
    /// Whether each endpoint is up.
    pub up: Vec<bool>,
}

impl Gateway {
    /// A gateway by its address, with or without `http://`.
    pub fn at(url: &str) -> Result<Self, String> {
        let host = url.strip_prefix("http://").unwrap_or(url).trim_end_matches('/');
        if host.is_empty() || host.contains('/') || !host.contains(':') {
            return Err(format!("{url}: expected something like http://127.0.0.1:11111"));
        }
        Ok(Gateway { url: url.to_owned(), host: host.to_owned() })
    }

    /// Finds a rule by what tells it from others.
    pub async fn rule(&self, rule: &Rule) -> Result<Told, String> {
        let answer = self.get("/config/loadbalancer/all").await?;
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
        let found = found.ok_or_else(|| format!("{}: the gateway has no rule {}", self.host, rule.key))?;
        let endpoints = found["endpoints"].as_array().map(Vec::as_slice).unwrap_or_default();
        let service = found["serviceArguments"]["service_id"].as_u64();
        Ok(Told {
            service: service.ok_or_else(|| format!("{}: the rule has no number", self.host))?,
            up: endpoints.iter().map(|endpoint| endpoint["state"] == "active").collect(),
        })
    }

    /// The keys that an endpoint holds.
    pub async fn keys(&self, service: u64, endpoint: usize) -> Result<Vec<u64>, String> {
        let answer = self.get(&format!("/config/ai/kv/inventory?service_id={service}&ep_idx={endpoint}")).await?;
        let blocks = answer["blocks"].as_array().map(Vec::as_slice).unwrap_or_default();
        Ok(blocks.iter().filter_map(|block| block["hash_uint64"].as_u64()).collect())
    }

    /// Asks for a path below the API's base.
    pub async fn get(&self, path: &str) -> Result<Value, String> {
        let path = format!("/netlox/v1{path}");
        let failed = |why: String| format!("{}{path}: {why}", self.host);
        let mut found = tokio::net::lookup_host(&self.host).await.map_err(|error| failed(error.to_string()))?;
        let address = found.next().ok_or_else(|| failed("the name has no address".to_owned()))?;
        let call = Call {
            address,
            path: &path,
            authorization: None,
            body: None,
            answer_bytes_max: ANSWER_BYTES_MAX,
            timeout: TIMEOUT,
        };
        let reply = call.ask().await.map_err(|error| failed(error.to_string()))?;
        match reply.status {
            200 => serde_json::from_slice(&reply.body).map_err(|error| failed(error.to_string())),
            status => Err(failed(format!("status {status}: {}", String::from_utf8_lossy(&reply.body)))),
        }
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
