//! What can be chosen of a simulated engine: one definition for the command line and for tests.

use std::net::IpAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::Parser;

use super::EngineError;
use super::fault::Fault;
use super::hash::vllm::Algo;
use super::hash::{Chain, Lora, sglang, trtllm, vllm};
use super::scheduler::{Model, Policy};
use super::sglang_wire::SglangRelease;
use super::trtllm_wire::TrtllmRelease;
use super::wire::Release;
use crate::assets::DEMO_MODEL;

/// Data-parallel ranks of an engine at most.
const RANKS_MAX: u16 = 8;

/// Tokens in a block at most where blocks are pickled: Python cuts longer pickles into frames.
const PICKLED_TOKENS_MAX: usize = 8192;

/// What engine is simulated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum EngineKind {
    /// vLLM.
    #[default]
    #[value(name = "vllm")]
    Vllm,
    /// SGLang.
    #[value(name = "sglang")]
    Sglang,
    /// TensorRT-LLM's `trtllm-serve`.
    #[value(name = "trtllm")]
    Trtllm,
    /// llama.cpp's server: no events.
    #[value(name = "llamacpp")]
    Llamacpp,
}

/// An engine's part in prefill/decode disaggregation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Role {
    /// It does both.
    #[default]
    #[value(name = "none")]
    None,
    /// It computes prompts for others.
    #[value(name = "prefill")]
    Prefill,
    /// It goes on where others computed.
    #[value(name = "decode")]
    Decode,
}

/// An adapter that is loaded at the start: its name and where from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoraOption {
    /// The name, which requests give as their model.
    pub name: String,
    /// The path.
    pub path: String,
}

impl FromStr for LoraOption {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once('=') {
            Some((name, path)) if !name.is_empty() && !path.is_empty() => {
                Ok(Self { name: name.to_owned(), path: path.to_owned() })
            }
            _ => Err(format!("`{text}` is not NAME=PATH")),
        }
    }
}

/// A simulated engine's options; [`EngineOptions::default`] gives the command line's defaults.
#[derive(Clone, Debug, clap::Args)]
pub struct EngineOptions {
    /// What engine it is.
    #[arg(long, value_enum, default_value_t)]
    pub kind: EngineKind,
    /// Address that all sockets are bound to.
    #[arg(long, default_value = "127.0.0.1")]
    pub host: IpAddr,
    /// HTTP port of the first engine; 0 for any.
    #[arg(long, default_value_t = 8000)]
    pub port: u16,
    /// Port of the first engine's event publisher; 0 for any.
    #[arg(long, default_value_t = 5557)]
    pub event_port: u16,
    /// Connect the event publisher to this collector (tcp://ADDRESS:PORT) instead of binding it.
    #[arg(long)]
    pub event_connect: Option<String>,
    /// Port of the first engine's replay socket; 0 for any. Without it there is no replay.
    #[arg(long)]
    pub replay_port: Option<u16>,
    /// No replay, whatever --replay-port says.
    #[arg(long)]
    pub no_replay: bool,
    /// First frame of every event message.
    #[arg(long, default_value = "")]
    pub topic: String,
    /// vLLM release whose event and replay formats are used, 0.10.2 to 0.33.
    #[arg(long, default_value = "0.33")]
    pub wire: Release,
    /// SGLang release, 0.5.7 to 0.5.23.
    #[arg(long, default_value = "0.5.23")]
    pub sglang_release: SglangRelease,
    /// TensorRT-LLM release.
    #[arg(long, value_enum, default_value = "1.2")]
    pub trtllm_release: TrtllmRelease,
    /// TensorRT-LLM's event_buffer_max_size: events that wait for a drain; the oldest are dropped for more.
    #[arg(long, default_value_t = 65_536)]
    pub event_buffer: usize,
    /// TensorRT-LLM pushes its events over ZMQ (kv_events_config): its drain is always empty then.
    #[arg(long)]
    pub push: bool,
    /// Data-parallel ranks: a cache each, event and replay ports one after the other.
    #[arg(long, default_value_t = 1)]
    pub dp: u16,
    /// An adapter, NAME=PATH; several may be given.
    #[arg(long = "lora")]
    pub loras: Vec<LoraOption>,
    /// Blocks of a host tier that blocks are copied to (vLLM, SGLang) or moved to (TensorRT-LLM); 0 for none.
    #[arg(long, default_value_t = 0)]
    pub cpu_blocks: usize,
    /// Tokens that the sliding-window layers of a hybrid model see; 0 for a model without.
    #[arg(long, default_value_t = 0)]
    pub window: usize,
    /// Tokens that EAGLE or MTP looks ahead: enters vLLM's hashes from 0.33, makes SGLang's pages pairs; 0 for none.
    #[arg(long, default_value_t = 0)]
    pub lookahead: usize,
    /// A fault from the start: NAME, NAME=VALUE or the JSON of POST /debug/fault; several may be given.
    #[arg(long = "fault")]
    pub faults: Vec<Fault>,
    /// Name blocks by whole digests instead of 64-bit keys (VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0).
    #[arg(long)]
    pub bytes_hashes: bool,
    /// Directory with `<model with / replaced by __>/tokenizer.json`; the embedded demo model's files without it.
    #[arg(long)]
    pub tokenizers: Option<PathBuf>,
    /// Name of the served model.
    #[arg(long, default_value = DEMO_MODEL)]
    pub model: String,
    /// Tokens in a block.
    #[arg(long, default_value_t = 16)]
    pub block_size: usize,
    /// Blocks in the cache.
    #[arg(long, default_value_t = 4096)]
    pub blocks: usize,
    /// Hash algorithm of the blocks.
    #[arg(long, value_enum, default_value_t = Algo::Sha256Cbor)]
    pub algo: Algo,
    /// PYTHONHASHSEED; `none` where the variable is unset: fixed for sha256 from 0.29, else drawn for each rank.
    #[arg(long, default_value = "0")]
    pub seed: String,
    /// Prompt tokens computed in a second by all requests together.
    #[arg(long, default_value_t = 20_000.0)]
    pub prefill_tps: f64,
    /// Answer tokens made in a second by each request.
    #[arg(long, default_value_t = 50.0)]
    pub decode_tps: f64,
    /// Least time of a step that computes prompt tokens, in milliseconds.
    #[arg(long, default_value_t = 5.0)]
    pub ttft_floor_ms: f64,
    /// Every simulated time is multiplied by this; 0 does not wait at all.
    #[arg(long, default_value_t = 1.0)]
    pub time_scale: f64,
    /// Requests that run at once.
    #[arg(long, default_value_t = 256)]
    pub max_running: usize,
    /// Requests that run or wait; more are answered 503.
    #[arg(long, default_value_t = 4096)]
    pub max_requests: usize,
    /// Tokens computed in one step.
    #[arg(long, default_value_t = 2048)]
    pub max_batched_tokens: usize,
    /// Tokens of a prompt and its answer; never more than the cache holds.
    #[arg(long, default_value_t = 131_072)]
    pub max_model_len: usize,
    /// Its part in prefill/decode disaggregation.
    #[arg(long, value_enum, default_value_t)]
    pub role: Role,
    /// Port of a prefill engine's side channel (NIXL's, SGLang's bootstrap server); 0 for any.
    #[arg(long, default_value_t = 0)]
    pub side_port: u16,
    /// vLLM's NixlPushConnector: the decode leg waits for the prefill leg of the same X-Request-Id.
    #[arg(long)]
    pub nixl_push: bool,
    /// vLLM: X-Request-Ids of legs must name this prefill port and both addresses.
    #[arg(long)]
    pub nixl_port: Option<u16>,
    /// vLLM: the answer's kv_transfer_params are those of a MultiConnector of LMCache and NIXL.
    #[arg(long)]
    pub nested_params: bool,
    /// vLLM: prefill answers carry no kv_transfer_params.
    #[arg(long)]
    pub no_params: bool,
    /// TensorRT-LLM's internal_request_auth_key: generation legs must be signed with it.
    #[arg(long)]
    pub disagg_auth_key: Option<String>,
    /// How long a leg waits for the other, in milliseconds.
    #[arg(long, default_value_t = 30_000)]
    pub pd_wait_ms: u64,
    /// How long what was prefilled is kept for its decode leg, in milliseconds.
    #[arg(long, default_value_t = 30_000)]
    pub pd_lease_ms: u64,
    /// Longest answer that ends by itself; each is between an eighth of this and this, drawn from its prompt.
    #[arg(long, default_value_t = 128)]
    pub answer_tokens: usize,
}

#[derive(Parser)]
#[command(no_binary_name = true)]
struct Defaults {
    #[command(flatten)]
    options: EngineOptions,
}

impl Default for EngineOptions {
    fn default() -> Self {
        Defaults::parse_from(std::iter::empty::<&str>()).options
    }
}

impl EngineOptions {
    /// Options for tests: any free ports, replay on, and no waiting.
    #[must_use]
    pub fn ephemeral() -> Self {
        Self { port: 0, event_port: 0, replay_port: Some(0), time_scale: 0.0, ..Self::default() }
    }

    /// The options of the `index`-th of several engines: every given port moves by `stride` an engine.
    ///
    /// # Errors
    /// A port would be above 65535.
    pub fn nth(&self, index: u16, stride: u16) -> Result<Self, EngineError> {
        let shift = |port: u16| match port {
            0 => Ok(0),
            port => stride
                .checked_mul(index)
                .and_then(|shift| port.checked_add(shift))
                .ok_or_else(|| EngineError::Option(format!("port {port} + {index} × {stride} is above 65535"))),
        };
        Ok(Self {
            // HTTP ports are one after the other whatever the stride of the event ports.
            port: if self.port == 0 { 0 } else { self.port.checked_add(index).ok_or_else(|| port_error(self.port))? },
            event_port: shift(self.event_port)?,
            replay_port: self.replay_port.map(shift).transpose()?,
            ..self.clone()
        })
    }

    /// Checks what the command line's types cannot.
    ///
    /// # Errors
    /// The first option that cannot be used, with what it may be.
    pub fn check(&self) -> Result<(), EngineError> {
        let wrong = |text: &str| Err(EngineError::Option(text.to_owned()));
        let speed = |value: f64| value.is_finite() && value >= 1e-3;
        if self.wire < Release::new(10, 2) {
            return wrong("--wire: the hash algorithms exist from 0.10.2");
        }
        if self.algo.is_pickled() && self.block_size > PICKLED_TOKENS_MAX {
            return wrong("--block-size: at most 8192 with the pickled algorithms");
        }
        if !(1..=RANKS_MAX).contains(&self.dp) {
            return wrong("--dp is 1 to 8");
        }
        let kind = self.kind;
        if kind == EngineKind::Vllm && self.window > 0 && self.wire < Release::new(20, 0) {
            return wrong("--window: before 0.20 KV events switch hybrid caches off");
        }
        if self.push && (kind != EngineKind::Trtllm || self.cpu_blocks > 0 || self.window > 0) {
            return wrong("--push is for trtllm without --cpu-blocks and --window");
        }
        if kind == EngineKind::Sglang && self.window > 0 {
            return wrong("--window is simulated for vllm and trtllm only");
        }
        if kind == EngineKind::Llamacpp && (self.dp > 1 || self.cpu_blocks > 0 || self.window > 0) {
            return wrong("--kind llamacpp has no ranks, tiers and windows");
        }
        if self.lookahead > 64 || (self.lookahead > 0 && !matches!(kind, EngineKind::Vllm | EngineKind::Sglang)) {
            return wrong("--lookahead is 0 to 64, and simulated for vllm and sglang only");
        }
        if self.role != Role::None && kind == EngineKind::Llamacpp {
            return wrong("--role: llamacpp disaggregates nothing");
        }
        if self.event_buffer == 0 {
            return wrong("--event-buffer is at least 1");
        }
        if !(1..=65_536).contains(&self.block_size) || !(1..=16_777_216).contains(&self.blocks) {
            return wrong("--block-size is 1 to 65536, --blocks 1 to 16777216");
        }
        if self.max_running == 0 || self.max_batched_tokens == 0 || self.answer_tokens == 0 || self.max_model_len < 2 {
            return wrong("--max-running, --max-batched-tokens and --answer-tokens are at least 1, --max-model-len 2");
        }
        if !speed(self.prefill_tps) || !speed(self.decode_tps) {
            return wrong("--prefill-tps and --decode-tps are at least 0.001");
        }
        if !(0.0..=3_600_000.0).contains(&self.ttft_floor_ms) || !(0.0..=1e6).contains(&self.time_scale) {
            return wrong("--ttft-floor-ms is 0 to 3600000, --time-scale 0 to 1000000");
        }
        Ok(())
    }

    /// What the scheduler needs of them.
    #[must_use]
    pub fn scheduler_model(&self) -> Model {
        Model {
            block_tokens: self.block_size,
            step_tokens: self.max_batched_tokens,
            running_max: self.max_running,
            prefill_tokens_per_second: self.prefill_tps,
            decode_tokens_per_second: self.decode_tps,
            prefill_floor: Duration::from_secs_f64(self.ttft_floor_ms / 1000.0),
            chain: self.chain(),
            policy: self.policy(),
        }
    }

    /// Whether it publishes events over ZMQ.
    #[must_use]
    pub fn publishes(&self) -> bool {
        matches!(self.kind, EngineKind::Vllm | EngineKind::Sglang) || self.push
    }

    /// How a rank hashes; drawn anew where the seed is.
    #[must_use]
    pub fn chain(&self) -> Chain {
        match self.kind {
            EngineKind::Vllm | EngineKind::Llamacpp => {
                let lookahead = if self.looks_ahead() { self.lookahead } else { 0 };
                Chain::Vllm(vllm::Chain::new(self.algo, &self.seed, self.wire, self.block_size, lookahead))
            }
            EngineKind::Sglang => Chain::Sglang(sglang::Chain {
                bigrams: self.lookahead > 0,
                salted: self.sglang_release.salts_and_coalesces(),
                lora_names: self.sglang_release.names_loras(),
            }),
            EngineKind::Trtllm => Chain::Trtllm(trtllm::Chain { salted: true }),
        }
    }

    fn policy(&self) -> Policy {
        match self.kind {
            EngineKind::Vllm | EngineKind::Llamacpp => {
                Policy::Vllm { drop_last: self.lookahead > 0 && !self.looks_ahead() }
            }
            EngineKind::Sglang => Policy::Sglang,
            EngineKind::Trtllm => Policy::Trtllm,
        }
    }

    /// Whether tokens after a block enter its hash: vLLM from 0.33.
    fn looks_ahead(&self) -> bool {
        self.lookahead > 0 && self.wire >= Release::new(33, 0)
    }

    /// Port of the first rank's replay socket, if there is one.
    #[must_use]
    pub fn replay(&self) -> Option<u16> {
        self.replay_port.filter(|_| !self.no_replay)
    }

    /// The adapter of this name.
    #[must_use]
    pub fn lora(&self, name: &str) -> Option<Lora> {
        let place = self.loras.iter().position(|lora| lora.name == name)?;
        Some(Lora { id: place as u64 + 1, name: name.to_owned(), path: self.loras[place].path.clone() })
    }

    /// Tokens that a prompt and its answer may have together.
    #[must_use]
    pub fn tokens_max(&self) -> usize {
        self.max_model_len.min(self.blocks * self.block_size)
    }
}

fn port_error(port: u16) -> EngineError {
    EngineError::Option(format!("--port {port}: the last engine's would be above 65535"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_move_by_the_stride_unless_free() {
        let options =
            EngineOptions { port: 8000, event_port: 5557, replay_port: Some(6557), ..EngineOptions::default() };
        let third = options.nth(2, 10).expect("the ports are small");
        assert_eq!((third.port, third.event_port, third.replay_port), (8002, 5577, Some(6577)));
        let free = EngineOptions::ephemeral().nth(2, 10).expect("free ports do not move");
        assert_eq!((free.port, free.event_port, free.replay_port), (0, 0, Some(0)));
        assert!(EngineOptions { event_port: 65_535, ..options }.nth(1, 1).is_err());
    }

    #[test]
    fn what_cannot_be_simulated_is_refused() {
        let check = |change: fn(&mut EngineOptions)| {
            let mut options = EngineOptions::default();
            change(&mut options);
            options.check()
        };
        assert!(check(|_| ()).is_ok());
        assert!(check(|o| o.wire = Release::new(10, 1)).is_err());
        assert!(check(|o| o.blocks = 0).is_err());
        assert!(check(|o| o.max_running = 0).is_err());
        assert!(check(|o| o.prefill_tps = 0.0).is_err());
        assert!(check(|o| o.decode_tps = f64::NAN).is_err());
        assert!(check(|o| o.time_scale = -1.0).is_err());
        assert!(check(|o| o.dp = 9).is_err());
        assert!(check(|o| (o.window, o.wire) = (128, Release::new(19, 0))).is_err());
        assert!(check(|o| (o.kind, o.dp) = (EngineKind::Llamacpp, 2)).is_err());
        assert!(check(|o| (o.kind, o.lookahead) = (EngineKind::Trtllm, 1)).is_err());
        assert!(check(|o| (o.algo, o.block_size) = (Algo::Sha256, 16_384)).is_err());
        assert!("=path".parse::<LoraOption>().is_err() && "name".parse::<LoraOption>().is_err());
    }
}
