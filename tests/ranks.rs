//! Engines with a cache for each data-parallel rank: what could hit does, or as much as was predicted.

mod common;

use common::asking::{MODEL, ask, cached, completion, evidence};
use common::fleet::{self, EngineProcess};
use common::gateway::{Gateway, Options};
use common::{client, free_port, wait_for};
use serde_json::json;

#[test]
fn engine_process() {
    fleet::run_as_engine();
}

/// Engines with four ranks each, and a gateway over them that knows their release and has their model.
struct Ranks {
    engines: Vec<EngineProcess>,
    gateway: Gateway,
    port: u16,
    _tokenizers: common::Scratch,
}

impl Ranks {
    /// With more options of the rule.
    fn start(wire: &str, options: &str) -> Self {
        let engines: Vec<_> =
            (0..2).map(|_| EngineProcess::start_ranks(4, &format!("--wire {wire} --time-scale 0"))).collect();
        let tokenizers = fleet::tokenizers();
        let port = free_port();
        let config = fleet::rule(port, &tokenizers, &engines)
            .replace("kvBlockSize = 16", &format!("kvBlockSize = 16\nkvDpRankCount = 4\nrouteHeader = true\n{options}"))
            // Decisions of one shard are the same in every run.
            .replacen("[limits]", "[shards]\ncount = 1\n\n[limits]", 1);
        let environment = vec![("LOXILB_KV_COLDSTART_SEED_N", "0".to_owned())];
        let gateway = Gateway::start(Options { config, environment, ..Options::default() });
        let ranks = Ranks { engines, gateway, port, _tokenizers: tokenizers };
        wait_for("the engines have said their release, and their model is loaded", || {
            let status = ranks.gateway.api("/status/ready").json();
            let known =
                |index: usize| status["engines"][index]["version"].as_str().is_some_and(|v| v.starts_with(wire));
            let loaded = status["models"].as_array()?.iter().any(|model| model["state"] == "ready");
            (known(0) && known(1) && loaded).then_some(())
        });
        ranks
    }

    fn blocks(&self) -> usize {
        (0..2).map(|index| self.gateway.inventory(0, index).len()).sum()
    }

    /// Waits until the gateway knows of every block that the engines hold.
    fn settle(&self) {
        let made = || self.engines.iter().map(|engine| engine.keys().len()).sum::<usize>();
        wait_for("all blocks are announced", || (self.blocks() == made()).then_some(()));
    }
}

/// The `turn`-th prompt of a conversation: each begins with the one before.
fn turn_of(conversation: usize, turn: usize) -> String {
    let sentence = |turn: usize| {
        format!("Conversation {conversation} has come to its turn {turn}, in which nobody says anything new at all. ")
    };
    (0..=turn).map(|turn| sentence(turn).repeat(3)).collect()
}

/// Numbers that look drawn, from a seed.
struct Draw(u64);

impl Draw {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % bound
    }

    fn shuffle(&mut self, places: &mut [usize]) {
        (1..places.len()).rev().for_each(|place| places.swap(place, self.below(place + 1)));
    }
}

/// Conversations go on in whatever order: each turn finds all whole blocks of the turn before.
fn what_could_hit_does(mode: &str, mut draw: Draw) {
    const TURNS: usize = 4;
    let seed = draw.0;
    let ranks = Ranks::start("0.33.0", &format!("kvLbMode = \"{mode}\""));
    let (mut hit, mut could) = (0, 0);
    let mut turns = [0; 12];
    while turns.iter().any(|turn| *turn < TURNS) {
        let conversation = draw.below(turns.len());
        let turn = turns[conversation];
        if turn == TURNS {
            continue;
        }
        turns[conversation] += 1;
        let answer = ask(ranks.port, &[], &completion(&turn_of(conversation, turn)));
        hit += cached(&answer);
        if turn > 0 {
            could += ask_tokens(&ranks, &turn_of(conversation, turn - 1)) / 16 * 16;
            assert_eq!(evidence(&answer, "tier"), Some("tier15"), "{:?}", answer.header("x-kvlane-route"));
            assert!(evidence(&answer, "rank").is_some(), "{:?}", answer.header("x-kvlane-route"));
        }
        ranks.settle();
    }
    assert!(hit * 100 >= could * 95, "{hit} of {could} tokens hit ({mode}, seed {seed})");
    let chosen = ask(ranks.port, &[("X-data-parallel-rank", "2")], &completion(&turn_of(0, 3)));
    assert_eq!(evidence(&chosen, "rank"), None, "a client's own rank is left alone");
}

#[test]
fn with_a_cache_for_each_rank_what_could_hit_does_because_the_engine_is_told_the_rank() {
    what_could_hit_does("hard", Draw(1));
}

#[test]
fn what_could_hit_does_in_an_order_drawn_anew_each_run() {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("after 1970");
    what_could_hit_does("ttft", Draw(now.as_nanos() as u64));
}

/// Tokens of a prompt, as an engine counts them.
fn ask_tokens(ranks: &Ranks, prompt: &str) -> u64 {
    let body = json!({"model": MODEL, "prompt": prompt});
    client::post(ranks.engines[0].address, "/tokenize", &body).json()["count"].as_u64().expect("a count")
}

/// An engine that cannot be told a rank takes the next, so that chance decides what hits; what is predicted is the mean over
/// its ranks. Over this many requests of conversations that come in an order without a pattern the two are as good as equal.
#[test]
fn where_no_rank_can_be_named_as_much_hits_as_was_predicted() {
    let ranks = Ranks::start("0.10.2", "");
    let mut draw = Draw(1);
    let mut order: Vec<usize> = (0..96).collect();
    for round in 0..12 {
        draw.shuffle(&mut order);
        for &conversation in &order {
            ask(ranks.port, &[], &completion(&turn_of(conversation, round / 2)));
        }
        ranks.settle();
    }
    let sum = |name: &str| ranks.gateway.metric_sum(name);
    let (predicted, cached) =
        (sum("kvlane_prediction_predicted_tokens_total"), sum("kvlane_prediction_cached_tokens_total"));
    assert!(cached > 10_000.0 && (predicted - cached).abs() <= cached * 0.05, "{predicted} predicted, {cached} cached");
    for engine in &ranks.engines {
        let last = client::get(engine.address, "/debug/last").text();
        assert!(!last.contains("data-parallel-rank"), "{last}");
    }
}
