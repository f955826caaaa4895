//! Carries out faults: those of the whole engine here, those of a rank by its driver.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::sync::oneshot;

use super::driver::Command;
use super::fault::Fault;
use super::options::{EngineKind, EngineOptions};
use super::shared::Shared;

/// How often the second drainer drains.
const SECOND_DRAIN: Duration = Duration::from_millis(5);

/// Does what goes wrong.
///
/// # Errors
/// What this engine cannot suffer, and why.
pub async fn carry_out(shared: &Arc<Shared>, fault: &Fault) -> Result<(), String> {
    let options = shared.options();
    match fault {
        fault if options.kind == EngineKind::Llamacpp && is_about_events(fault) => {
            Err("llama.cpp tells no events".to_owned())
        }
        Fault::BlockSize(size) => reconfigure(shared, |options| options.block_size = *size).await,
        Fault::Seed(_) | Fault::Algorithm(_) if options.kind != EngineKind::Vllm => {
            Err("only vLLM has a seed and a choice of algorithms".to_owned())
        }
        Fault::Seed(seed) => reconfigure(shared, |options| options.seed.clone_from(seed)).await,
        Fault::Algorithm(algo) => reconfigure(shared, |options| options.algo = *algo).await,
        Fault::Template(source) => shared.text().with_template(source).map(|text| shared.set_text(text)),
        Fault::Model(name) => {
            shared.set_options(EngineOptions { model: name.clone(), ..(*options).clone() });
            Ok(())
        }
        Fault::SecondDrainer(on) => second_drainer(shared, *on),
        Fault::Health(state) => {
            shared.health.lock().map(|mut health| *health = *state).map_err(|error| error.to_string())
        }
        Fault::Leg { mark, fault } => shared.orders.give(mark.as_deref(), *fault),
        Fault::Clear { .. } | Fault::PhantomClear { .. } if options.kind == EngineKind::Trtllm => {
            Err("TensorRT-LLM has no event that says its cache was cleared".to_owned())
        }
        Fault::Malformed { payload: true, .. } if options.kind == EngineKind::Trtllm => {
            Err("TensorRT-LLM publishes no payloads; a malformed event is possible".to_owned())
        }
        Fault::Drop { rank, .. }
        | Fault::Restart { rank }
        | Fault::Clear { rank }
        | Fault::Silence { rank, .. }
        | Fault::Malformed { rank, .. }
        | Fault::PhantomClear { rank }
        | Fault::Huge { rank, .. } => at_ranks(shared, *rank, fault).await,
    }
}

/// Whether a fault makes no sense without events.
fn is_about_events(fault: &Fault) -> bool {
    matches!(
        fault,
        Fault::Drop { .. }
            | Fault::Silence { .. }
            | Fault::Malformed { .. }
            | Fault::PhantomClear { .. }
            | Fault::Huge { .. }
            | Fault::SecondDrainer(_)
    )
}

/// Changes options that enter hashes: every rank starts over with them.
async fn reconfigure(shared: &Arc<Shared>, change: impl FnOnce(&mut EngineOptions)) -> Result<(), String> {
    let mut options = (*shared.options()).clone();
    change(&mut options);
    options.check().map_err(|error| error.to_string())?;
    shared.set_options(options);
    at_ranks(shared, None, &Fault::Restart { rank: None }).await
}

async fn at_ranks(shared: &Shared, rank: Option<u16>, fault: &Fault) -> Result<(), String> {
    let wanted = match rank {
        None => &shared.ranks[..],
        Some(rank) => shared
            .ranks
            .get(usize::from(rank)..=usize::from(rank))
            .ok_or_else(|| format!("rank {rank}: there are {}", shared.ranks.len()))?,
    };
    for link in wanted {
        let (sender, receiver) = oneshot::channel();
        let _ = link.commands.send(Command::Fault(fault.clone(), sender));
        receiver.await.map_err(|_| "the engine stops".to_owned())??;
    }
    Ok(())
}

fn second_drainer(shared: &Arc<Shared>, on: bool) -> Result<(), String> {
    if shared.drain.is_none() {
        return Err("only TensorRT-LLM is drained".to_owned());
    }
    let was_on = shared.second_drainer.swap(on, Ordering::Relaxed);
    if on && !was_on {
        let shared = Arc::clone(shared);
        tokio::spawn(async move {
            while shared.second_drainer.load(Ordering::Relaxed) {
                if let Some(drain) = &shared.drain {
                    drain.steal();
                }
                tokio::time::sleep(SECOND_DRAIN).await;
            }
        });
    }
    Ok(())
}
