//! One shard as the gateway runs it, with an echo and a timer beside its proxy.

use std::net::{SocketAddr, TcpListener};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::Context;
use hdrhistogram::Histogram;
use monoio::io::{AsyncReadRent, AsyncWriteRentExt};
use shards::affinity::Affinity;
use shards::executor::{self, Aside, Meter, Ring, Rung};
use shards::ids::{EndpointIndex, ServiceId, ShardId};
use shards::inventory::ReaderFactory;
use shards::limits::Limits;
use shards::load::{LoadSlot, LoadTable};
use shards::prompt::{Entry, Model, ModelTable, slug};
use shards::proxy::{Proxy, SWEEP_EVERY};
use shards::service::{Endpoint, EndpointShared, KvExact, Service, Tables};

use super::{BLOCK_TOKENS, contract};
use crate::e2e::cpu;

/// Period of the timer.
const TICK: Duration = Duration::from_millis(1);

/// What a shard is started with.
pub struct Setup {
    pub rung: Rung,
    pub core: usize,
    pub backend: SocketAddr,
    pub model: (String, Arc<Model>),
    pub inventory: ReaderFactory,
    /// Whether the shard remembers prompts.
    pub remembers: bool,
    /// The thread for work that cannot be sliced.
    pub aside: Aside,
}

const SETTLING: u8 = 0;
const MEASURING: u8 = 1;
const ENDING: u8 = 2;

/// A running shard.
pub struct Shard {
    pub proxy: SocketAddr,
    pub echo: SocketAddr,
    meter: Arc<Meter>,
    phase: Arc<AtomicU8>,
    thread: JoinHandle<anyhow::Result<Histogram<u64>>>,
}

impl Shard {
    /// From now on what is seen counts.
    pub fn begin(&self) {
        self.meter.reset();
        self.phase.store(MEASURING, Ordering::Relaxed);
    }

    /// Ends it: how late its timer was, in µs, and what its executor saw.
    ///
    /// # Errors
    /// The shard failed.
    pub fn end(self) -> anyhow::Result<(Histogram<u64>, Arc<Meter>)> {
        self.phase.store(ENDING, Ordering::Relaxed);
        let timer = self.thread.join().map_err(|_| anyhow::anyhow!("the shard's thread panicked"))??;
        Ok((timer, self.meter))
    }
}

/// A histogram of µs, up to a minute.
pub fn histogram() -> Histogram<u64> {
    Histogram::new_with_bounds(1, 60_000_000, 3).expect("the bounds are in order")
}

/// Starts a shard.
///
/// # Errors
/// No port, core or driver can be had.
pub fn start(setup: Setup) -> anyhow::Result<Shard> {
    let bind = || -> anyhow::Result<(TcpListener, SocketAddr)> {
        let listener = TcpListener::bind("127.0.0.1:0").context("no port can be had")?;
        listener.set_nonblocking(setup.rung == Rung::Epoll)?;
        let address = listener.local_addr()?;
        Ok((listener, address))
    };
    let ((proxy_listener, proxy), (echo_listener, echo)) = (bind()?, bind()?);
    let meter = Arc::new(Meter::default());
    let phase = Arc::new(AtomicU8::new(SETTLING));
    let (seen, phases) = (Arc::clone(&meter), Arc::clone(&phase));
    let thread = std::thread::Builder::new().name("shard".to_owned()).spawn(move || {
        cpu::pin(setup.core).with_context(|| format!("core {} cannot be used", setup.core))?;
        let built = Ring::build(setup.rung, 256);
        let (mut ring, ..) = built.map_err(|refusals| anyhow::anyhow!("no driver can be had: {refusals:?}"))?;
        let main = serve(setup, proxy, proxy_listener, echo_listener, phases);
        let ended = executor::run(&mut ring, seen, main);
        // Leaked, as the gateway does: the kernel may still own buffers.
        std::mem::forget(ring);
        ended.map_err(|_| anyhow::anyhow!("the shard panicked"))
    })?;
    Ok(Shard { proxy, echo, meter, phase, thread })
}

async fn serve(
    setup: Setup,
    address: SocketAddr,
    proxy_listener: TcpListener,
    echo_listener: TcpListener,
    phase: Arc<AtomicU8>,
) -> Histogram<u64> {
    let defaults = Limits::default();
    let prompt_cache_bytes = if setup.remembers { defaults.prompt_cache_bytes } else { 0 };
    let limits = Limits { prompt_cache_bytes, ..defaults };
    let proxy = Rc::new(Proxy::new(
        ShardId(0),
        limits,
        Arc::new(LoadTable::new(1, 4)),
        Arc::default(),
        &Affinity::new().0,
        Some(setup.aside),
    ));
    let slug = slug(&setup.model.0).unwrap_or_default();
    let models = ModelTable::new([(slug, Entry::Ready(setup.model.1))]);
    let service = service(address, setup.backend, setup.inventory);
    proxy.set_tables(&Tables { services: vec![Arc::new(service)], models: Arc::new(models) });
    let swept = Rc::clone(&proxy);
    executor::spawn(async move {
        loop {
            monoio::time::sleep(SWEEP_EVERY).await;
            swept.sweep().await;
        }
    });
    accept(proxy_listener, move |stream| executor::spawn(Rc::clone(&proxy).serve(stream, address)));
    accept(echo_listener, |stream| executor::spawn(echo(stream)));
    let mut late = histogram();
    loop {
        let start = Instant::now();
        monoio::time::sleep(TICK).await;
        let lateness = start.elapsed().saturating_sub(TICK);
        match phase.load(Ordering::Relaxed) {
            ENDING => return late,
            MEASURING => late.saturating_record(lateness.as_micros().max(1) as u64),
            _ => {}
        }
    }
}

fn accept(listener: TcpListener, serve: impl Fn(monoio::net::TcpStream) + 'static) {
    executor::spawn(async move {
        let Ok(listener) = monoio::net::TcpListener::from_std(listener) else { return };
        while let Ok((stream, _)) = listener.accept().await {
            serve(stream);
        }
    });
}

async fn echo(mut stream: monoio::net::TcpStream) {
    let _set = stream.set_nodelay(true);
    let mut buffer = vec![0; 64];
    loop {
        let (result, read) = stream.read(buffer).await;
        let Ok(length @ 1..) = result else { return };
        let (result, _) = stream.write_all(read[..length].to_vec()).await;
        if result.is_err() {
            return;
        }
        buffer = read;
    }
}

fn service(listen: SocketAddr, backend: SocketAddr, inventory: ReaderFactory) -> Service {
    let endpoint = Endpoint::at(backend, EndpointShared::new(EndpointIndex(0), LoadSlot(0), 1));
    let kv = KvExact {
        spill_relief: false,
        seed_every: 0,
        zero_hit_every: 0,
        ..KvExact::with_defaults(BLOCK_TOKENS, contract(), inventory)
    };
    Service { kv: Some(kv), ..Service::plain(ServiceId(0), listen, vec![endpoint], 1) }
}
