//! Tiers 0 and 1 of P/D rules over two shards: where conversations and texts went before.

use loadgen::engine::{Action, EngineKind, EngineOptions, Fault, LegFault, LegKind, Phase};
use serde_json::{Value, json};

use super::common::client::{Answer, Connection};
use super::common::pd::{Fleet, Plan};
use super::common::wait_for;
use super::{CHAT, TWO_SHARDS, chat, connection_on};

/// Where a request went, and which tier said so.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Route {
    tier: String,
    /// Places among the prefill and among the decode endpoints.
    pair: (usize, usize),
}

fn route(answer: &Answer) -> Route {
    assert_eq!(answer.status, 200, "{}", answer.text());
    let evidence = answer.header("x-kvlane-route").expect("the rule has it told");
    let value = |name: &str| {
        let value = evidence.split("; ").find_map(|part| part.strip_prefix(name)?.strip_prefix('='));
        value.unwrap_or_else(|| panic!("no {name} in {evidence}"))
    };
    // Prefill and decode endpoints alternate.
    let place = |name: &str| value(name).parse::<usize>().expect("a number") / 2;
    Route { tier: value("tier").to_owned(), pair: (place("ep_idx"), place("decode_idx")) }
}

/// Engines whose caches nobody hears of, and of which nothing is expected, behind two shards.
fn fleet(mut rule: Value) -> Fleet {
    rule["kvClaimMs"] = json!(0);
    let engine: fn(&mut EngineOptions) = |options| options.faults.push(Fault::Silence { rank: None, on: true });
    Fleet::start(&Plan { engine, rule, config: TWO_SHARDS.to_owned(), ..Plan::of(EngineKind::Vllm) })
}

/// How a request says which conversation it belongs to.
type Naming = fn(&str) -> (String, Vec<(&'static str, String)>, Value);

/// One request on a connection of its own, which any shard may get.
fn ask(fleet: &Fleet, naming: Naming, id: &str, text: &str) -> Route {
    let mut connection = Connection::open(fleet.listen).expect("the gateway listens");
    ask_on(&mut connection, naming, id, text)
}

fn ask_on(connection: &mut Connection, naming: Naming, id: &str, text: &str) -> Route {
    let (path, headers, more) = naming(id);
    let headers: Vec<_> = headers.iter().map(|(name, value)| (*name, value.as_str())).collect();
    connection.request("POST", &path, &headers, &chat(text, &more)).expect("the gateway reads");
    route(&connection.answer().expect("an answer"))
}

fn nobody(_: &str) -> (String, Vec<(&'static str, String)>, Value) {
    (CHAT.to_owned(), Vec::new(), json!({}))
}

fn by_header(name: &'static str, value: String) -> (String, Vec<(&'static str, String)>, Value) {
    (CHAT.to_owned(), vec![(name, value)], json!({}))
}

fn by_conversation(id: &str) -> (String, Vec<(&'static str, String)>, Value) {
    by_header("X-Conversation-Id", id.to_owned())
}

fn wait_for_sessions(fleet: &Fleet, count: f64) {
    wait_for(&format!("{count} sessions are known to all shards"), || {
        (fleet.gateway.metric_sum("loxilb_pd_sessions_active") == count).then_some(())
    });
}

fn assert_both_shards_served(fleet: &Fleet) {
    for shard in ["0", "1"] {
        let accepted = fleet.gateway.metric("kvlane_shard_connections_accepted_total", &[("shard", shard)]);
        assert!(accepted.is_some_and(|accepted| accepted > 0.0), "shard {shard} had no connection");
    }
}

#[test]
fn a_conversation_stays_with_its_pair_of_engines_on_every_shard() {
    let mut fleet = fleet(json!({}));
    let namings: [Naming; 3] = [
        by_conversation,
        |id| by_header("X-Session-Id", id.to_owned()),
        |id| (CHAT.to_owned(), Vec::new(), json!({"user": id})),
    ];
    let conversations: Vec<(Naming, String)> =
        (0..9).map(|number| (namings[number % 3], format!("conversation-{number}"))).collect();
    let firsts: Vec<Route> = conversations
        .iter()
        .map(|(naming, id)| ask(&fleet, *naming, id, &format!("the first words of {id}")))
        .collect();
    assert!(firsts.iter().all(|first| first.tier != "tier0"), "{firsts:?}");
    wait_for_sessions(&fleet, 9.0);
    for turn in 0..4 {
        for ((naming, id), first) in conversations.iter().zip(&firsts) {
            let again = ask(&fleet, *naming, id, &format!("turn {turn} of {id} says something else"));
            assert_eq!((again.tier.as_str(), again.pair), ("tier0", first.pair), "{id}, turn {turn}");
        }
    }
    assert_eq!(fleet.gateway.metric_sum("loxilb_ai_pd_session_hits_total"), 36.0);
    let used = |pick: fn(&Route) -> usize| firsts.iter().map(pick).collect::<std::collections::BTreeSet<_>>().len();
    assert_eq!((used(|route| route.pair.0), used(|route| route.pair.1)), (3, 3), "new ones are spread: {firsts:?}");
    assert_both_shards_served(&fleet);
    // The decode endpoint is a hint: without it, the conversation goes on.
    let ((naming, id), first) = (&conversations[0], &firsts[0]);
    fleet.decode.remove(first.pair.1).stop();
    let after = ask(&fleet, *naming, id, "its decode engine is gone");
    assert_eq!((after.tier.as_str(), after.pair.0), ("tier0", first.pair.0));
    assert_ne!(after.pair.1, first.pair.1);
    fleet.assert_idle("conversations");
}

#[test]
fn a_rule_may_say_where_a_request_names_its_session() {
    let places: [(&str, Naming); 4] = [
        ("x-tenant-session", |id| by_header("X-Tenant-Session", id.to_owned())),
        ("cookie:sid", |id| by_header("Cookie", format!("theme=dark; sid={id}"))),
        ("query:session", |id| (format!("{CHAT}?session={id}"), Vec::new(), json!({}))),
        ("basic-auth", |id| by_header("Authorization", format!("Basic {id}"))),
    ];
    for (place, naming) in places {
        let fleet = fleet(json!({"session_header_name": place}));
        let first = ask(&fleet, naming, "one", "the first words");
        wait_for_sessions(&fleet, 1.0);
        for turn in 0..6 {
            let again = ask(&fleet, naming, "one", &format!("turn {turn} says something else"));
            assert_eq!((again.tier.as_str(), again.pair), ("tier0", first.pair), "{place}, turn {turn}");
        }
        assert_ne!(ask(&fleet, naming, "another", "somebody else").tier, "tier0", "{place}");
        assert_ne!(ask(&fleet, by_conversation, "one", "not where the rule looks").tier, "tier0", "{place}");
    }
}

#[test]
fn a_conversation_that_says_nothing_for_long_enough_is_forgotten() {
    let fleet = fleet(json!({"pd_session_ttl_sec": 1}));
    let first = ask(&fleet, by_conversation, "short", "the first words");
    assert_ne!(first.tier, "tier0");
    wait_for_sessions(&fleet, 1.0);
    wait_for_sessions(&fleet, 0.0);
    for _ in 0..6 {
        // On either shard: neither the table nor what a shard knows by itself holds it.
        assert_ne!(ask(&fleet, nobody, "", "somebody else").tier, "tier0");
    }
    assert_ne!(ask(&fleet, by_conversation, "short", "after its time").tier, "tier0");
}

/// Has an engine's prefill legs stand still from now on.
fn hold(fleet: &Fleet, prefill: usize, on: bool) {
    fleet.prefill[prefill].set_leg_fault(on.then_some(LegFault::new(Action::Hang, Phase::Arrival)));
}

/// Sends a request and waits until a prefill engine has it; how many legs it held before and holds now.
fn begin(fleet: &Fleet, prefill: usize, naming: Naming, id: &str, text: &str) -> Connection {
    let before = fleet.prefill[prefill].legs().len();
    let mut connection = Connection::open(fleet.listen).expect("the gateway listens");
    let (path, headers, more) = naming(id);
    let headers: Vec<_> = headers.iter().map(|(name, value)| (*name, value.as_str())).collect();
    connection.request("POST", &path, &headers, &chat(text, &more)).expect("the gateway reads");
    wait_for("it is at the engine", || (fleet.prefill[prefill].legs().len() > before).then_some(()));
    connection
}

#[test]
fn a_conversation_leaves_an_engine_that_has_more_than_its_share_to_do() {
    let fleet = fleet(json!({}));
    for round in 0..6 {
        let id = format!("conversation-{round}");
        let first = ask(&fleet, by_conversation, &id, "the first words");
        wait_for_sessions(&fleet, f64::from(round + 1));
        hold(&fleet, first.pair.0, true);
        let held = begin(&fleet, first.pair.0, by_conversation, &id, "it stays, while nobody is there");
        let moved = ask(&fleet, by_conversation, &id, "it does not wait behind the other");
        assert_ne!(moved.tier, "tier0", "round {round}");
        assert_ne!(moved.pair.0, first.pair.0, "round {round}");
        drop(held);
        fleet.assert_idle("the held one left");
        hold(&fleet, first.pair.0, false);
    }
    assert_both_shards_served(&fleet);
    fleet.assert_clean();
}

/// A text of which about this part, in percent, is what others say too.
fn text(shared_percent: usize, own: &str) -> String {
    let shared = "The lake is deep, and what lies at its bottom nobody has seen. ".repeat(64);
    let of = |part: usize| part * shared.len() / 100;
    let rest = format!("{own} says this instead of what others do. ").repeat(64);
    format!("{}{}", &shared[..of(shared_percent)], &rest[..of(100 - shared_percent)])
}

#[test]
fn a_text_that_begins_as_another_goes_where_that_went_though_nobody_tells_of_caches() {
    let rule = json!({"pd_cache_aware_mode": true, "pd_cache_threshold": 50, "pd_balance_abs_threshold": 1});
    let fleet = fleet(rule);
    // Each shard has a tree of its own.
    for shard in [0, 1] {
        let mut connection = connection_on(&fleet, shard);
        let mut ask = |text: &str| ask_on(&mut connection, nobody, "", text);
        let first = ask(&text(100, ""));
        assert_ne!(first.tier, "tier1", "shard {shard} knows nothing yet");
        for turn in 0..4 {
            let again = ask(&text(90, &format!("turn {turn}")));
            assert_eq!((again.tier.as_str(), again.pair.0), ("tier1", first.pair.0), "shard {shard}, turn {turn}");
        }
        assert_ne!(ask(&text(30, &format!("another on {shard}"))).tier, "tier1", "less than the threshold");
        // Two that wait there are more than the balance allows.
        hold(&fleet, first.pair.0, true);
        let held = [1, 2].map(|number| {
            let legs = || fleet.legs(LegKind::Prefill).iter().filter(|leg| leg.held.is_some()).count();
            let mut connection = connection_on(&fleet, shard);
            let body = chat(&text(90, &format!("held {number}")), &json!({}));
            connection.request("POST", CHAT, &[], &body).expect("the gateway reads");
            wait_for("it is held", || (legs() == number).then_some(()));
            connection
        });
        let elsewhere = ask(&text(90, "one too many"));
        assert_ne!(elsewhere.tier, "tier1", "shard {shard}");
        assert_ne!(elsewhere.pair.0, first.pair.0, "shard {shard}");
        drop(held);
        fleet.assert_idle("the held ones left");
        hold(&fleet, first.pair.0, false);
    }
    assert!(fleet.gateway.metric_sum("loxilb_pd_trie_nodes") > 0.0);
    fleet.assert_clean();
}
