//! The shards as the supervisor handles them.

use std::collections::HashMap;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use shards::affinity::Affinity;
use shards::claims::Claims;
use shards::executor::{Aside, Rung};
use shards::ids::ShardId;
use shards::limits::Limits;
use shards::load::LoadTable;
use shards::service::Tables;
use shards::shard::{self, Command, CommandError, Receipt, ShardHandle, ShardOptions, ShardStatus};
use tracing::{error, info, warn};

use crate::config::Config;
use crate::cores::Plan;

use super::PartError;

/// Longest wait until every shard has confirmed a command.
pub(in crate::supervise) const CONFIRM_TIMEOUT: Duration = Duration::from_secs(1);
/// Pause between two looks at what was confirmed.
const CONFIRM_PAUSE: Duration = Duration::from_micros(500);
/// Looks in a row that must find the driver unvisited until a shard is reported: a busy one visits it in 1 ms, and an
/// idle one ten times a second.
const STILL_LOOKS: u32 = 2;
/// How much longer than the drain itself is waited for it to be confirmed.
const DRAIN_GRACE: Duration = Duration::from_secs(3);

/// Listening sockets by address, one per shard; none where a shard that failed has not come back.
pub(crate) type Listeners = HashMap<SocketAddr, Vec<Option<TcpListener>>>;

/// What others may know of one shard.
#[derive(Clone, Debug)]
pub struct ShardView {
    /// The core it runs on.
    pub core: usize,
    /// What it shows.
    pub status: Arc<ShardStatus>,
}

impl ShardView {
    /// The shard's number.
    #[must_use]
    pub fn id(&self) -> ShardId {
        self.status.id
    }

    /// The driver it runs on.
    #[must_use]
    pub fn driver(&self) -> &'static str {
        self.status.rung.get().map_or("none", |rung| rung.name())
    }

    /// The shard's state for the status page.
    #[must_use]
    pub fn report(&self) -> serde_json::Value {
        let status = &self.status;
        let refused: Vec<_> = status.refusals.get().into_iter().flatten().collect();
        serde_json::json!({
            "shard": self.id().0,
            "core": self.core,
            "driver": self.driver(),
            "refused": refused
                .iter()
                .map(|refusal| serde_json::json!({"driver": refusal.rung.name(), "reason": refusal.reason}))
                .collect::<Vec<_>>(),
            "connections": status.connections_open.load(Ordering::Relaxed),
            "heartbeat": status.meter.visits.load(Ordering::Relaxed),
            "gap_max_us": status.meter.gap_max_ns.load(Ordering::Relaxed) / 1000,
            "gap_p999_us": status.meter.gap_us_at(0.999),
        })
    }
}

#[derive(Debug)]
pub(crate) struct Shards {
    running: Vec<Running>,
    ring_entries: u32,
    first_rung: Rung,
    limits: Limits,
    loads: Arc<LoadTable>,
    claims: Arc<Claims>,
    affinity: Arc<Affinity>,
    backlog: u32,
    /// Does for all shards what cannot be sliced; on the control core.
    aside: Aside,
}

#[derive(Debug)]
struct Running {
    core: usize,
    handle: ShardHandle,
    /// Visits to the driver at the last look, and looks in a row that found the same.
    visits: u64,
    still: u32,
}

impl Shards {
    pub(super) fn start(
        config: &Config,
        plan: &Plan,
        loads: &Arc<LoadTable>,
        affinity: &Arc<Affinity>,
    ) -> Result<Self, PartError> {
        let mut shards = Shards {
            running: Vec::with_capacity(plan.shards.len()),
            ring_entries: config.ring_entries,
            first_rung: config.first_rung,
            limits: config.limits.clone(),
            loads: Arc::clone(loads),
            claims: Arc::default(),
            affinity: Arc::clone(affinity),
            backlog: config.listen_backlog,
            aside: Aside::start().map_err(PartError::AsideStart)?,
        };
        for (number, core) in plan.shards.iter().enumerate() {
            let id = ShardId(u16::try_from(number).expect("a plan has at most 1,024 shards"));
            let handle = shards.spawn(id, *core)?;
            shards.running.push(Running { core: *core, handle, visits: 0, still: 0 });
        }
        Ok(shards)
    }

    fn spawn(&self, id: ShardId, core: usize) -> Result<ShardHandle, PartError> {
        let options = ShardOptions {
            id,
            core: Some(core),
            ring_entries: self.ring_entries,
            first_rung: self.first_rung,
            limits: self.limits.clone(),
            loads: Arc::clone(&self.loads),
            claims: Arc::clone(&self.claims),
            affinity: Arc::clone(&self.affinity),
            aside: Some(self.aside.clone()),
        };
        Ok(shard::spawn(options)?)
    }

    pub(crate) fn len(&self) -> usize {
        self.running.len()
    }

    pub(crate) fn views(&self) -> Vec<ShardView> {
        self.running
            .iter()
            .map(|running| ShardView { core: running.core, status: Arc::clone(running.handle.status()) })
            .collect()
    }

    /// Gives every shard the tables and waits until all serve with them.
    pub(crate) async fn tables(&self, tables: Arc<Tables>, until: Instant) -> Result<(), PartError> {
        self.tell_all(until, |_| Ok(Command::Tables(Arc::clone(&tables)))).await
    }

    /// Lets every shard accept on a socket of its own.
    pub(crate) async fn listen(
        &self,
        address: SocketAddr,
        sockets: &[Option<TcpListener>],
        until: Instant,
    ) -> Result<(), PartError> {
        self.tell_all(until, |number| {
            let socket = sockets[number].as_ref().map(TcpListener::try_clone);
            let socket = socket.unwrap_or_else(|| Err(std::io::ErrorKind::NotFound.into()));
            socket.map(|socket| Command::Listen(address, socket)).map_err(|e| CommandError::Listen(address, e))
        })
        .await
    }

    /// Lets no shard accept at the address any more.
    pub(crate) async fn unlisten(&self, address: SocketAddr) {
        let until = Instant::now() + CONFIRM_TIMEOUT;
        if let Err(error) = self.tell_all(until, |_| Ok(Command::Unlisten(address))).await {
            warn!(%address, %error, "a shard may still accept");
        }
    }

    /// Tells every shard to be as it was before a change that failed: these tables, and none of these addresses. Nobody
    /// waits for it: a shard does what it is told in order, and one that is silent would make the refusal late.
    pub(crate) fn take_back(&self, tables: &Arc<Tables>, addresses: impl Iterator<Item = SocketAddr>) {
        let commands: Vec<Option<SocketAddr>> = addresses.map(Some).chain([None]).collect();
        for running in &self.running {
            for address in &commands {
                let command = address.map_or_else(|| Command::Tables(Arc::clone(tables)), Command::Unlisten);
                if let Err(error) = running.handle.send(command) {
                    let shard = running.handle.status().id.0;
                    error!(shard, %error, "a shard does not take back the rules it had");
                }
            }
        }
    }

    /// Sends a command to every shard and waits for all confirmations. The first failure is returned, after all have
    /// answered or the time is over.
    async fn tell_all(
        &self,
        until: Instant,
        command: impl Fn(usize) -> Result<Command, CommandError>,
    ) -> Result<(), PartError> {
        let mut waiting: Vec<(u16, Receipt)> = Vec::with_capacity(self.running.len());
        let mut failure = None;
        for (number, running) in self.running.iter().enumerate() {
            let shard = running.handle.status().id.0;
            match command(number).and_then(|command| running.handle.send(command)) {
                Ok(receipt) => waiting.push((shard, receipt)),
                Err(source) => failure = failure.or(Some(PartError::ShardCommand { shard, source })),
            }
        }
        loop {
            waiting.retain(|(shard, receipt)| match receipt.poll() {
                None => true,
                Some(Ok(())) => false,
                Some(Err(source)) => {
                    failure.get_or_insert(PartError::ShardCommand { shard: *shard, source });
                    false
                }
            });
            let Some((shard, _)) = waiting.first() else { break };
            if Instant::now() >= until {
                failure.get_or_insert(PartError::ShardSilent { shard: *shard });
                break;
            }
            tokio::time::sleep(CONFIRM_PAUSE).await;
        }
        failure.map_or(Ok(()), Err)
    }

    /// Reports shards that stand still and replaces those that failed; true if any was replaced. Sockets of a shard
    /// that does not come back are closed, so that the kernel gives their connections to the others.
    pub(crate) async fn look_after(&mut self, tables: &Arc<Tables>, listeners: &mut Listeners) -> bool {
        let mut replaced = false;
        for number in 0..self.running.len() {
            let running = &mut self.running[number];
            let (id, core) = (running.handle.status().id, running.core);
            if running.handle.failed() || running.handle.ended() {
                error!(shard = id.0, "shard failed; it is replaced");
                replaced |= self.replace(number, id, core, tables, listeners).await;
                continue;
            }
            let visits = running.handle.status().meter.visits.load(Ordering::Relaxed);
            running.still = if visits == running.visits { running.still + 1 } else { 0 };
            running.visits = visits;
            if running.still == STILL_LOOKS {
                error!(shard = id.0, core, "shard stands still: it has not visited its driver for two seconds");
            }
        }
        replaced
    }

    async fn replace(
        &mut self,
        number: usize,
        id: ShardId,
        core: usize,
        tables: &Arc<Tables>,
        listeners: &mut Listeners,
    ) -> bool {
        let handle = match self.spawn(id, core) {
            Ok(handle) => handle,
            Err(error) => {
                error!(shard = id.0, %error, "shard does not come back; trying again each second");
                listeners.values_mut().for_each(|sockets| sockets[number] = None);
                return false;
            }
        };
        let mut receipts = vec![handle.send(Command::Tables(Arc::clone(tables)))];
        for (address, sockets) in listeners.iter_mut() {
            if sockets[number].is_none() {
                sockets[number] = crate::supervise::sockets::join(*address, self.backlog).ok();
            }
            if let Some(Ok(socket)) = sockets[number].as_ref().map(TcpListener::try_clone) {
                receipts.push(handle.send(Command::Listen(*address, socket)));
            }
        }
        let deadline = Instant::now() + CONFIRM_TIMEOUT;
        for receipt in receipts {
            let result = match receipt {
                Ok(receipt) => confirmed(receipt, deadline).await,
                Err(error) => Err(error),
            };
            if let Err(error) = result {
                warn!(shard = id.0, %error, "the new shard did not take all it needs");
            }
        }
        self.running[number] = Running { core, handle, visits: 0, still: 0 };
        info!(shard = id.0, "shard replaced");
        true
    }

    /// Lets every shard finish what runs and end, and cuts what is left after `timeout`.
    pub(super) async fn drain(self, timeout: Duration) {
        if let Err(error) = self.tell_all(Instant::now() + timeout + DRAIN_GRACE, |_| Ok(Command::Drain(timeout))).await
        {
            warn!(%error, "drain");
            return;
        }
        for running in self.running {
            // It has answered that it is done, and ends now.
            running.handle.join();
        }
    }
}

async fn confirmed(receipt: Receipt, deadline: Instant) -> Result<(), CommandError> {
    loop {
        if let Some(answer) = receipt.poll() {
            return answer;
        }
        if Instant::now() >= deadline {
            return Err(CommandError::TimedOut);
        }
        tokio::time::sleep(CONFIRM_PAUSE).await;
    }
}
