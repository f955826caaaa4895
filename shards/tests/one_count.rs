//! What is counted for a service is counted once for all shards.

mod support;

use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use shards::block::{Contract, HashAlgo, NoneHash};
use shards::executor::{Aside, Rung};
use shards::ids::{EndpointIndex, Rank, ServiceId, ShardId};
use shards::inventory::{self, ReaderFactory};
use shards::load::{LoadSlot, LoadTable};
use shards::prompt::{Api, Entry, Job, Keying, Model, ModelTable, Rendering, Step};
use shards::service::{self, Endpoint, EndpointShared, KvExact, Service, ServiceShared, Tables, Target};
use shards::shard::{Command, ShardHandle, ShardOptions, spawn};
use support::*;

const BLOCK_TOKENS: u32 = 16;

fn contract() -> Contract {
    Contract::vllm(NoneHash::from_seed(HashAlgo::Sha256Cbor, "0"))
}

/// Several shards of one service, each at an address of its own, so that a test chooses who gets a request.
struct Shards {
    shards: Vec<ShardHandle>,
    addresses: Vec<SocketAddr>,
    service: Arc<ServiceShared>,
    endpoints: Vec<Arc<EndpointShared>>,
    publisher: Option<(Arc<AtomicBool>, JoinHandle<()>)>,
}

impl Shards {
    fn start(count: usize, model: &Arc<Model>, engines: &[&Engine], inventory: &ReaderFactory) -> Self {
        let loads = Arc::new(LoadTable::new(count, 16));
        let service = Arc::new(ServiceShared::new(count));
        let endpoints: Vec<_> = (0..engines.len())
            .map(|index| Arc::new(EndpointShared::new(EndpointIndex(index as u16), LoadSlot(index as u32), count)))
            .collect();
        let mut all = Shards { shards: Vec::new(), addresses: Vec::new(), service, endpoints, publisher: None };
        for id in 0..count {
            let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
            let address = listener.local_addr().expect("an address");
            let shard = spawn(ShardOptions {
                id: ShardId(id as u16),
                core: None,
                ring_entries: 256,
                first_rung: Rung::DeferTaskrun,
                limits: limits(),
                loads: Arc::clone(&loads),
                affinity: shards::affinity::Affinity::new().0,
                claims: Arc::default(),
                aside: Some(Aside::start().expect("a thread")),
            })
            .expect("the shard starts");
            let models = ModelTable::new([("m".to_owned(), Entry::Ready(Arc::clone(model)))]);
            let services = vec![Arc::new(all.service_at(address, engines, inventory, count))];
            send(&shard, Command::Tables(Arc::new(Tables { services, models: Arc::new(models) })));
            send(&shard, Command::Listen(address, listener));
            all.shards.push(shard);
            all.addresses.push(address);
        }
        // What the ingest thread does.
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let publisher = std::thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                loads.publish(16);
                std::thread::sleep(Duration::from_micros(200));
            }
        });
        all.publisher = Some((stop, publisher));
        all
    }

    fn service_at(&self, listen: SocketAddr, engines: &[&Engine], inventory: &ReaderFactory, count: usize) -> Service {
        let endpoint = |(engine, shared): (&&Engine, &Arc<EndpointShared>)| {
            Endpoint::of(Target::at(engine.address), Arc::clone(shared))
        };
        let kv = KvExact::with_defaults(BLOCK_TOKENS, contract(), inventory.clone());
        let endpoints = engines.iter().zip(&self.endpoints).map(endpoint).collect();
        Service {
            kv: Some(kv),
            shared: Arc::clone(&self.service),
            ..Service::plain(ServiceId(0), listen, endpoints, count)
        }
    }

    fn stop(mut self) {
        for shard in self.shards.drain(..) {
            let receipt = shard.send(Command::Drain(Duration::from_secs(2))).expect("the shard takes commands");
            receipt.wait(PATIENCE).expect("the shard drains");
            shard.join();
        }
        let (stop, publisher) = self.publisher.take().expect("it was started");
        stop.store(true, Ordering::Relaxed);
        publisher.join().expect("it does not panic");
    }
}

#[test]
fn of_32_hits_in_a_row_beside_a_cold_worker_the_16th_and_the_32nd_are_diverted_whichever_shard_they_reach() {
    let model = model();
    let body = serde_json::json!({"model": "m", "prompt": "The quick brown fox jumps over the lazy dog. ".repeat(40)});
    let body = body.to_string().into_bytes();
    let keying = Keying { contract: &contract(), block_tokens: BLOCK_TOKENS, lora: None };
    let mut job =
        Job::new(Api::Completions, &body, &model, Rendering::of(service::Engine::Vllm), keying).expect("a prompt");
    while job.step().expect("a good prompt") == Step::More {}
    let held = job.take_keys().to_vec();
    for count in [1, 2, 4] {
        let engines = [Engine::echo("warm"), Engine::echo("cold")];
        let (mut writer, inventory) = inventory::new(&inventory::Options { blocks_expected: 1_000 });
        let holder = writer.add_holder(EndpointIndex(0), Rank(0)).expect("a slot");
        held.iter().for_each(|key| writer.store(*key, holder));
        eventually("the inventory is published", || writer.try_publish() && writer.pending() == 0);
        let shards = Shards::start(count, &model, &engines.each_ref(), &inventory);
        shards.endpoints[0].set_kv_blocks(held.len() as u64);
        let diverted: Vec<_> = (1..=32)
            .filter(|number| {
                let address = shards.addresses[number % count];
                let answer = Client::connect(address).ask(post("/v1/completions", &body));
                assert_eq!(answer.status(), 200);
                answer.body.starts_with(b"cold")
            })
            .collect();
        assert_eq!(diverted, [16, 32], "{count} shards");
        let sum = |read: fn(&service::EndpointStats) -> &std::sync::atomic::AtomicU64| {
            let of = |shared: &Arc<EndpointShared>| {
                shared.stats.iter().map(|stats| read(stats).load(Ordering::Relaxed)).sum::<u64>()
            };
            shards.endpoints.iter().map(of).collect::<Vec<_>>()
        };
        assert_eq!(sum(|stats| &stats.hits), [30, 2]);
        assert_eq!(sum(|stats| &stats.cold_seeds), [0, 2]);
        assert_eq!(sum(|stats| &stats.spills), [0, 0], "each came after the one before had ended");
        shards.stop();
    }
}
