//! One phase's fleet on loopback: simulated engines in this process, the gateway in a process of its own.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::time::Duration;

use anyhow::Context;

use super::{DECODE_TPS, Sizes};
use crate::assets;
use crate::child::{Child, free_ports, http_get};
use crate::engine::{Engine, EngineHandle, EngineOptions};

/// Time for the gateway to come up: it loads one tokenizer and connects to the engines.
const START_MAX: Duration = Duration::from_secs(20);

/// Engines of the fleet.
pub(super) const ENGINES: u16 = 4;

/// How the gateway routes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Routing {
    RoundRobin,
    KvExact,
}

impl Routing {
    pub(super) fn name(self) -> &'static str {
        match self {
            Routing::RoundRobin => "round robin",
            Routing::KvExact => "KV-exact",
        }
    }

    fn kv_exact_mode(self) -> u8 {
        match self {
            Routing::RoundRobin => 0,
            Routing::KvExact => 3,
        }
    }
}

/// Running engines and a gateway in front of them; dropping it stops all.
pub(super) struct Fleet {
    // Dropped in this order: the gateway first, or it would see its engines die.
    _gateway: Child,
    engines: Vec<EngineHandle>,
    pub(super) url: String,
    pub(super) driver: String,
}

impl Fleet {
    /// Starts fresh engines and a fresh gateway, whose files go below `directory`.
    pub(super) fn start(directory: &Path, sizes: &Sizes, routing: Routing) -> anyhow::Result<Self> {
        let engines = Engine::start_many(&engine_options(sizes), ENGINES, 1).context("the engines cannot start")?;
        let ports = free_ports(2)?;
        let [vip, admin] = [ports[0], ports[1]].map(|port| SocketAddr::from((Ipv4Addr::LOCALHOST, port)));
        let name = format!("gateway-{}", routing.kv_exact_mode());
        let file = directory.join(format!("{name}.toml"));
        std::fs::write(&file, configuration(directory, routing, vip, admin, &engines)?)?;
        let log = directory.join(format!("{name}.log"));
        let arguments = ["gateway", "serve", "-c"].map(str::to_owned).into_iter().chain([file.display().to_string()]);
        let mut gateway = Child::start("the gateway", &arguments.collect::<Vec<_>>(), &log)?;
        let answers = || http_get(vip, "/v1/models").is_ok_and(|(status, _)| status == 200);
        gateway
            .wait_until("answering /v1/models", START_MAX, answers)
            .with_context(|| format!("its log:\n{}", std::fs::read_to_string(&log).unwrap_or_default()))?;
        let driver = driver(admin);
        Ok(Fleet { _gateway: gateway, engines, url: format!("http://{vip}"), driver })
    }

    /// Requests that each engine answered to the end.
    pub(super) fn served(&self) -> Vec<u64> {
        self.engines.iter().map(|engine| engine.stats().completed).collect()
    }
}

fn engine_options(sizes: &Sizes) -> EngineOptions {
    EngineOptions {
        port: 0,
        event_port: 0,
        replay_port: Some(0),
        blocks: sizes.blocks,
        prefill_tps: sizes.prefill_tps,
        decode_tps: DECODE_TPS,
        ..EngineOptions::default()
    }
}

fn configuration(
    directory: &Path,
    routing: Routing,
    vip: SocketAddr,
    admin: SocketAddr,
    engines: &[EngineHandle],
) -> anyhow::Result<String> {
    let options = EngineOptions::default();
    let tokenizers = directory.join("tokenizers");
    assets::stage(&tokenizers).context("the demo's tokenizer cannot be written")?;
    let mut text = format!(
        "# Written by `loadgen demo`: {} in front of {} simulated engines.\n\
         [shards]\ncores = \"auto\"\ncount = 1\n\n\
         [tokenizers]\ndir = {}\n\n[admin]\nlisten = \"{admin}\"\n\n\
         [[rule]]\nname = \"demo\"\nexternalIP = \"{}\"\nport = {}\nprotocol = \"tcp\"\nsel = 0\nmode = 4\nkvExactMode = {}\n",
        routing.name(),
        engines.len(),
        toml_text(&tokenizers),
        vip.ip(),
        vip.port(),
        routing.kv_exact_mode(),
    );
    if routing == Routing::KvExact {
        text += &format!(
            "kvEngineType = \"vllm\"\nkvBlockSize = {}\nkvHashAlgo = \"sha256_cbor\"\nkvNoneHashSeed = \"{}\"\n",
            options.block_size, options.seed
        );
    }
    for engine in engines {
        let address = engine.http_addr;
        text += &format!("\n[[rule.endpoints]]\nendpointIP = \"{}\"\ntargetPort = {}\n", address.ip(), address.port());
        if routing == Routing::KvExact {
            let ports = engine.event_addr.zip(engine.replay_addr).context("the engines publish and replay")?;
            text += &format!("kvZmqPort = {}\nkvReplayPort = {}\n", ports.0.port(), ports.1.port());
        }
    }
    Ok(text)
}

/// A path as a TOML string; JSON's escapes are TOML's.
fn toml_text(path: &Path) -> String {
    serde_json::Value::from(path.display().to_string()).to_string()
}

/// What drives the gateway's shards, by its own word.
fn driver(admin: SocketAddr) -> String {
    let status = http_get(admin, "/netlox/v1/status/ready").ok();
    let value = status.and_then(|(_, body)| serde_json::from_str::<serde_json::Value>(&body).ok());
    value.as_ref().and_then(find_driver).unwrap_or_else(|| "unknown".to_owned())
}

/// The first text named `driver`, wherever it stands.
fn find_driver(value: &serde_json::Value) -> Option<String> {
    match value {
        serde_json::Value::Object(fields) => match fields.get("driver") {
            Some(serde_json::Value::String(driver)) => Some(driver.clone()),
            _ => fields.values().find_map(find_driver),
        },
        serde_json::Value::Array(items) => items.iter().find_map(find_driver),
        _ => None,
    }
}
