//! Prefill/decode disaggregation as engines do it: what a prefill engine keeps for decode engines, and the side channel
//! by which these come for it.
//!
//! ```text
//!  Computing ──▶ Ready ──claim──▶ Taken ──moved──▶ Moved
//!      │           │                │
//!      └───────────┴── its leg ended before its time ──▶ Aborted      (a lease that ran out: Expired)
//! ```
//! A transfer is named by a key: vLLM's remote request id, SGLang's room, TensorRT-LLM's context request id. A key is
//! never used twice; what was never issued, issued to be taken once and taken twice, or changed on its way is refused.
//!
//! Simulated: who asks whom for what, and what is refused. Differs: no tensors move, the side channel is HTTP, and what
//! no decode leg came for is given up only when it is looked at.

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::Router;
use axum::extract::{DefaultBodyLimit, Json, State as Given};
use axum::http::StatusCode;
use axum::routing::post;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::watch;
use tokio::time::{Instant, timeout};

use super::shared::Shared;

/// What is said of a transfer whose prefill leg ended before its time: no fault of whoever comes for it.
pub const ABORTED: &str = "was aborted";
/// Bytes of a claim: it says again what a prefill leg's answer said, with the blocks of a long prompt.
const CLAIM_BYTES_MAX: usize = 64 * 1024 * 1024;
/// Transfers remembered; the oldest is forgotten for another.
const TRANSFERS_MAX: usize = 65_536;

/// Where a transfer stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Computing,
    Ready,
    Taken,
    Moved,
    Aborted,
}

#[derive(Debug)]
struct Transfer {
    stage: Stage,
    /// What the decode leg has to show, byte for byte; empty where the key is all.
    proof: String,
    /// The prefill leg's `X-Request-Id`, where the decode leg must have the same.
    request_id: Option<String>,
    /// Since when it has been ready.
    since: Instant,
}

/// What a prefill engine has for decode engines.
#[derive(Debug)]
pub struct Plane {
    /// Where the side channel listens; none on engines that are no prefill engines.
    pub address: Option<SocketAddr>,
    transfers: Mutex<Transfers>,
    changed: watch::Sender<()>,
}

#[derive(Debug, Default)]
struct Transfers {
    by_key: HashMap<String, Transfer>,
    order: VecDeque<String>,
}

/// What a decode leg asks a prefill engine for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Claim {
    /// Which transfer.
    pub key: String,
    /// What the prefill leg's answer said, as it came.
    pub proof: String,
    /// The decode leg's `X-Request-Id`, where both legs must have one.
    pub request_id: Option<String>,
    /// Whether a transfer that does not exist is waited for: both legs are sent at once.
    pub concurrent: bool,
}

impl Plane {
    /// Nothing to be had yet.
    #[must_use]
    pub fn new(address: Option<SocketAddr>) -> Self {
        Self { address, transfers: Mutex::default(), changed: watch::channel(()).0 }
    }

    /// A transfer begins.
    ///
    /// # Errors
    /// The key was used before.
    pub fn begin(&self, key: &str, request_id: Option<String>) -> Result<(), String> {
        let mut transfers = self.transfers.lock().unwrap_or_else(PoisonError::into_inner);
        if transfers.by_key.contains_key(key) {
            return Err(format!("`{key}` was used before"));
        }
        if transfers.order.len() == TRANSFERS_MAX
            && let Some(oldest) = transfers.order.pop_front()
        {
            transfers.by_key.remove(&oldest);
        }
        transfers.order.push_back(key.to_owned());
        let transfer = Transfer { stage: Stage::Computing, proof: String::new(), request_id, since: Instant::now() };
        transfers.by_key.insert(key.to_owned(), transfer);
        drop(transfers);
        self.changed.send_replace(());
        Ok(())
    }

    /// Its prompt is computed; whoever comes for it shows the proof.
    pub fn ready(&self, key: &str, proof: &str) {
        self.advance(key, &[Stage::Computing], Stage::Ready, |transfer| {
            (transfer.proof, transfer.since) = (proof.to_owned(), Instant::now());
        });
    }

    /// Its prefill leg ended before its time.
    pub fn abort(&self, key: &str) {
        self.advance(key, &[Stage::Computing, Stage::Ready, Stage::Taken], Stage::Aborted, |_| ());
    }

    fn advance(&self, key: &str, from: &[Stage], to: Stage, also: impl FnOnce(&mut Transfer)) -> bool {
        let mut transfers = self.transfers.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(transfer) = transfers.by_key.get_mut(key).filter(|transfer| from.contains(&transfer.stage)) else {
            return false;
        };
        transfer.stage = to;
        also(transfer);
        drop(transfers);
        self.changed.send_replace(());
        true
    }

    fn stage(&self, key: &str) -> Option<Stage> {
        let transfers = self.transfers.lock().unwrap_or_else(PoisonError::into_inner);
        transfers.by_key.get(key).map(|transfer| transfer.stage)
    }

    /// Prompts that wait for their decode leg.
    #[must_use]
    pub fn held(&self) -> u64 {
        let transfers = self.transfers.lock().unwrap_or_else(PoisonError::into_inner);
        transfers.by_key.values().filter(|transfer| transfer.stage == Stage::Ready).count() as u64
    }

    /// Waits until the stage is one of those, or the transfer was aborted; whether it is, within the time.
    async fn reach(&self, key: &str, stages: &[Stage], time: Duration) -> Result<(), String> {
        let mut changes = self.changed.subscribe();
        let waiting = async {
            loop {
                match self.stage(key) {
                    Some(stage) if stages.contains(&stage) => return Ok(()),
                    Some(Stage::Aborted) => return Err(format!("the prefill leg of `{key}` {ABORTED}")),
                    _ => {}
                }
                if changes.changed().await.is_err() {
                    return Err("the engine stops".to_owned());
                }
            }
        };
        timeout(time, waiting).await.unwrap_or_else(|_| Err(format!("`{key}`: the other leg did not come in time")))
    }

    /// Waits until a decode engine has come for the transfer.
    ///
    /// # Errors
    /// None came in time.
    pub async fn taken(&self, key: &str, time: Duration) -> Result<(), String> {
        self.reach(key, &[Stage::Taken, Stage::Moved], time).await
    }

    /// Waits until the decode engine says that it has everything.
    ///
    /// # Errors
    /// It did not in time.
    pub async fn moved(&self, key: &str, time: Duration) -> Result<(), String> {
        self.reach(key, &[Stage::Moved], time).await
    }

    /// A decode engine comes for a transfer.
    async fn claim(&self, claim: &Claim, wait: Duration, lease: Duration) -> Result<(), String> {
        let key = &claim.key;
        if claim.concurrent {
            self.reach(key, &[Stage::Ready, Stage::Taken, Stage::Moved], wait).await?;
        }
        let mut transfers = self.transfers.lock().unwrap_or_else(PoisonError::into_inner);
        let transfer = transfers.by_key.get_mut(key).ok_or_else(|| format!("`{key}` was never issued"))?;
        match transfer.stage {
            Stage::Ready if transfer.since.elapsed() > lease => return Err(format!("the lease of `{key}` is over")),
            Stage::Ready => {}
            Stage::Computing => return Err(format!("`{key}` is not computed yet")),
            Stage::Aborted => return Err(format!("the prefill leg of `{key}` {ABORTED}")),
            Stage::Taken | Stage::Moved => return Err(format!("`{key}` was taken before")),
        }
        if transfer.proof != claim.proof {
            return Err(format!("`{key}`: {} was issued, {} came", transfer.proof, claim.proof));
        }
        if transfer.request_id != claim.request_id {
            let (one, other) = (&transfer.request_id, &claim.request_id);
            return Err(format!("`{key}`: the legs' X-Request-Ids are {one:?} and {other:?}"));
        }
        transfer.stage = Stage::Taken;
        drop(transfers);
        self.changed.send_replace(());
        Ok(())
    }
}

/// The side channel's paths.
pub fn router(shared: Arc<Shared>) -> Router {
    Router::new()
        .route("/claim", post(claim))
        .route("/moved", post(moved))
        .layer(DefaultBodyLimit::max(CLAIM_BYTES_MAX))
        .with_state(shared)
}

async fn claim(Given(shared): Given<Arc<Shared>>, Json(claim): Json<Claim>) -> (StatusCode, Json<Value>) {
    let options = shared.options();
    let [wait, lease] = [options.pd_wait_ms, options.pd_lease_ms].map(Duration::from_millis);
    reply(shared.plane.claim(&claim, wait, lease).await)
}

#[derive(Deserialize)]
struct Key {
    key: String,
}

/// The decode engine has everything, unless the prefill leg ended before its time.
async fn moved(Given(shared): Given<Arc<Shared>>, Json(Key { key }): Json<Key>) -> (StatusCode, Json<Value>) {
    let moved = shared.plane.advance(&key, &[Stage::Taken], Stage::Moved, |_| ());
    reply(if moved { Ok(()) } else { Err(format!("the prefill leg of `{key}` is over, or was never taken")) })
}

fn reply(outcome: Result<(), String>) -> (StatusCode, Json<Value>) {
    match outcome {
        Ok(()) => (StatusCode::OK, Json(json!({}))),
        Err(error) => (StatusCode::CONFLICT, Json(json!({"error": error}))),
    }
}

/// Comes for a transfer of the prefill engine at `at`.
///
/// # Errors
/// What that engine says, or why it says nothing.
pub async fn fetch(at: SocketAddr, claim: &Claim) -> Result<(), String> {
    ask(at, "/claim", &json!(claim)).await
}

/// Tells the prefill engine at `at` that everything has come.
///
/// # Errors
/// As [`fetch`].
pub async fn tell_moved(at: SocketAddr, key: &str) -> Result<(), String> {
    ask(at, "/moved", &json!({"key": key})).await
}

async fn ask(at: SocketAddr, path: &str, body: &Value) -> Result<(), String> {
    let body = body.to_string();
    let failed = |error: std::io::Error| format!("the prefill engine at {at} does not answer: {error}");
    let mut stream = tokio::net::TcpStream::connect(at).await.map_err(failed)?;
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: {at}\r\nconnection: close\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(head.as_bytes()).await.map_err(failed)?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await.map_err(failed)?;
    let answer = String::from_utf8_lossy(&answer);
    match answer.split_once("\r\n\r\n") {
        Some((head, _)) if head.starts_with("HTTP/1.1 200") => Ok(()),
        Some((_, body)) if !body.is_empty() => Err(body.to_owned()),
        _ => Err(format!("the prefill engine at {at} broke off")),
    }
}
