//! A look-up and the choice after it ask the allocator for nothing, once the shard has made as many as it needs to know
//! how much memory they take.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::hint::black_box;

use shards::block::{Contract, FIXED_SEED, HashAlgo, NoneHash};
use shards::ids::{BlockKey, EndpointIndex, Rank, ServiceId, ShardId};
use shards::inventory::{self, Medium, Reader, Run, SpaceIndex, Walk};
use shards::load::{LoadSlot, LoadTable};
use shards::route::{Chooser, Claimed, Evidence, Facts, Turn, choose_decode, decide};
use shards::service::{
    Blend, Disagg, Endpoint, EndpointShared, KvExact, MissReason, PrefixHashing, Role, Select, Service,
};

struct Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

thread_local! {
    /// Times that this thread asked for memory.
    static ASKED: Cell<u64> = const { Cell::new(0) };
}

fn note() {
    ASKED.set(ASKED.get() + 1);
}

// SAFETY: every call is handed to the system's allocator unchanged; only a counter without a destructor is kept beside it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note();
        // SAFETY: the caller's promises for this call are the ones `System` asks for.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the pointer came from `System` through `alloc` or `realloc`, with this layout.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        note();
        // SAFETY: the pointer came from `System`, with this layout; the new size is the caller's promise.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

/// How often `work` asks for memory.
fn asked(work: impl FnOnce()) -> u64 {
    let before = ASKED.get();
    work();
    ASKED.get() - before
}

const SHARD: ShardId = ShardId(0);
const ENDPOINTS: u16 = 24;
const BLOCKS: u64 = 150;

/// Keys of a prompt; none of two prompts are equal.
fn keys(prompt: u64) -> Vec<BlockKey> {
    (0..BLOCKS).map(|block| BlockKey((prompt << 32 | block) * 2 + 1)).collect()
}

/// An inventory in which each endpoint has another part of the first prompt, in device memory and beyond.
fn held() -> (inventory::Writer, Reader) {
    let (mut writer, readers) = inventory::new(&inventory::Options { blocks_expected: 10_000 });
    for index in 0..ENDPOINTS {
        let endpoint = EndpointIndex(index);
        for (medium, blocks) in [(Medium::Device, 6), (Medium::Cpu, 8)] {
            let holder = writer.add_holder_to(medium, SpaceIndex::OWN, endpoint, Rank(0)).expect("there is room");
            writer.follow(None);
            keys(0)[..usize::from(index + 1).min(15) * blocks].iter().for_each(|key| writer.store(*key, holder));
        }
    }
    while writer.pending() > 0 {
        assert!(writer.try_publish(), "nobody reads");
    }
    (writer, readers.reader())
}

fn service(blend: Blend, select: Select, role: impl Fn(u16) -> Role) -> Service {
    let (_, inventory) = inventory::new(&inventory::Options { blocks_expected: 1 });
    let contract = Contract::vllm(NoneHash::from_seed(HashAlgo::Sha256Cbor, FIXED_SEED));
    let endpoint = |index: u16| {
        let shared = EndpointShared::new(EndpointIndex(index), LoadSlot(index.into()), 1);
        // Two of them are cold.
        shared.set_kv_blocks(if index % 11 == 1 { 0 } else { 1_000 });
        shared.set_cache_blocks((!index.is_multiple_of(3)).then_some(5_000 + u32::from(index)));
        Endpoint { role: role(index), ..Endpoint::at(([127, 0, 0, 1], 9_000 + index).into(), shared) }
    };
    let kv = KvExact { blend, ..KvExact::with_defaults(16, contract, inventory) };
    let endpoints = (0..ENDPOINTS).map(endpoint).collect();
    let plain = Service::plain(ServiceId(0), ([127, 0, 0, 1], 8_000).into(), endpoints, 1);
    Service { kv: Some(kv), select, hashing: PrefixHashing::default(), ..plain }.with_ring()
}

/// Looks prompts up and decides about them, hits, claims and misses, some of them after a refusal.
fn look_up_and_decide(service: &Service, reader: &Reader, prompts: &[Vec<BlockKey>; 2]) -> u64 {
    let loads = std::sync::Arc::new(LoadTable::new(1, usize::from(ENDPOINTS)));
    let _busy = [0, 3, 3, 9].map(|slot| loads.reserve(SHARD, LoadSlot(slot), 2_000));
    let (mut turn, mut walk) = (Turn::starting_at(SHARD), Walk::default());
    let mut runs: Vec<Run> = Vec::new();
    let claims = [2, 7].map(|index| Claimed { endpoint: EndpointIndex(index), rank: None, tokens: 1_600 });
    let mut once = |number: usize| {
        let prompt = &prompts[number % 2];
        runs.clear();
        walk.restart();
        let guard = reader.enter().expect("the writer lives");
        let _ = guard.advance(&mut walk, &prompt[..40]) && guard.advance(&mut walk, &prompt[40..]);
        runs.extend(walk.runs(&guard));
        drop(guard);
        assert_eq!(runs.is_empty(), number % 2 == 1, "one prompt is held and the other is not");
        let evidence = match number % 5 {
            4 => Evidence::None(MissReason::Shallow),
            _ => Evidence::Scored { prompt_tokens: BLOCKS * 16 + 5, runs: &runs },
        };
        let facts = Facts {
            tried: &[EndpointIndex(5)][..number / 2 % 2],
            prefix: Some(number as u64),
            claims: &claims[..number / 3 % 3],
            ..Facts::of(evidence)
        };
        let mut chooser = Chooser { shard: SHARD, loads: &loads, turn: &mut turn };
        assert!(black_box(decide(service, &facts, &mut chooser)).is_some());
        black_box(choose_decode(service, None, &[], &mut chooser));
    };
    (0..60).for_each(&mut once);
    asked(|| (0..600).for_each(&mut once))
}

#[test]
fn look_ups_and_decisions_take_no_memory_whatever_the_blend_and_the_selection() {
    let (_writer, reader) = held();
    let prompts = [keys(0), keys(1)];
    assert!(asked(|| drop(black_box(prompts.clone()))) > 0, "asking is counted");
    for blend in Blend::ALL {
        for select in Select::ALL {
            let service = service(blend, select, |_| Role::Normal);
            assert_eq!(look_up_and_decide(&service, &reader, &prompts), 0, "{blend:?}, {select:?}");
        }
        let role = |index: u16| if index < ENDPOINTS / 2 { Role::Prefill } else { Role::Decode };
        let disaggregated = Service { pd: Some(Disagg::default()), ..service(blend, Select::default(), role) };
        assert_eq!(look_up_and_decide(&disaggregated, &reader, &prompts), 0, "{blend:?}, prefill and decode");
    }
}
