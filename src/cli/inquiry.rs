//! Questions to the management API of a running gateway, and the keys of a prompt to ask about.

use std::io::{Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use shards::http::reply::complete;
use shards::ids::BlockKey;
use shards::prompt::{Api, Job, Keying, Model, Rendering, Step};
use shards::service::MissReason;

use crate::rules::Rule;

/// Longest answer, bytes: an inventory of several million keys. A longer one is an error.
const ANSWER_BYTES_MAX: u64 = 512 << 20;
/// Longest silence of the gateway.
const PATIENCE: Duration = Duration::from_secs(10);

/// A gateway's management API.
pub(super) struct Gateway {
    address: String,
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
        let address = url.strip_prefix("http://").unwrap_or(url).trim_end_matches('/');
        if address.contains('/') || !address.contains(':') {
            return Err(format!("--url {url}: expected something like http://127.0.0.1:11111"));
        }
        Ok(Gateway { address: address.to_owned() })
    }

    /// Finds a rule by what tells it from others.
    pub fn rule(&self, rule: &Rule) -> Result<Told, String> {
        let answer = self.get("/netlox/v1/config/loadbalancer/all")?;
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
        let found = found.ok_or_else(|| format!("{}: the gateway has no rule {}", self.address, rule.key))?;
        let endpoints = found["endpoints"].as_array().map(Vec::as_slice).unwrap_or_default();
        let service = found["serviceArguments"]["service_id"].as_u64();
        Ok(Told {
            service: service.ok_or_else(|| format!("{}: the rule has no number", self.address))?,
            up: endpoints.iter().map(|endpoint| endpoint["state"] == "active").collect(),
        })
    }

    /// The keys that an endpoint holds.
    pub fn keys(&self, service: u64, endpoint: usize) -> Result<Vec<u64>, String> {
        let path = format!("/netlox/v1/config/ai/kv/inventory?service_id={service}&ep_idx={endpoint}");
        let answer = self.get(&path)?;
        let blocks = answer["blocks"].as_array().map(Vec::as_slice).unwrap_or_default();
        Ok(blocks.iter().filter_map(|block| block["hash_uint64"].as_u64()).collect())
    }

    fn get(&self, path: &str) -> Result<Value, String> {
        let answer = self.exchange(path).map_err(|error| format!("{}{path}: {error}", self.address))?;
        let reply = complete(&answer, true).ok().flatten();
        let reply = reply.ok_or_else(|| format!("{}{path}: no HTTP, or only a part of an answer", self.address))?;
        if reply.status != 200 {
            return Err(format!("{}{path}: status {}", self.address, reply.status));
        }
        serde_json::from_slice(&reply.body).map_err(|error| format!("{}{path}: {error}", self.address))
    }

    fn exchange(&self, path: &str) -> std::io::Result<Vec<u8>> {
        let address = self.address.to_socket_addrs()?.next();
        let address = address.ok_or_else(|| std::io::Error::other("the name has no address"))?;
        let mut stream = TcpStream::connect_timeout(&address, PATIENCE)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        // In one piece: whoever answers before the last of several has closed by then.
        let request = format!("GET {path} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n\r\n", self.address);
        stream.write_all(request.as_bytes())?;
        let mut answer = Vec::new();
        stream.take(ANSWER_BYTES_MAX).read_to_end(&mut answer)?;
        Ok(answer)
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
