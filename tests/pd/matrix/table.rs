//! The matrix as a table: which cells there are, which there cannot be and why, and what each must come to.

use loadgen::engine::LegEnd;
use shards::disagg::Dialect;

/// All dialects.
pub const DIALECTS: [Dialect; 4] = [Dialect::NixlPull, Dialect::NixlPush, Dialect::Bootstrap, Dialect::Context];

/// Which leg goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leg {
    Prefill,
    Decode,
}

/// What is done to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// All its endpoints refuse connections.
    Refuse,
    /// One of its two endpoints does.
    RefuseOne,
    /// The engine answers with this status.
    Status(u16),
    /// It says nothing more.
    Hang,
    /// Its connection breaks: before it answers, or in the middle, as the phase says.
    Die,
    /// It ends its answer in good order, too early.
    Cut,
    /// It pauses, and goes on.
    Slow,
    /// The client leaves.
    Leave,
}

/// Where its request is then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Its connection is being opened.
    Connect,
    /// The engine has read it and done nothing yet.
    Arrival,
    /// The engine has computed and written nothing.
    Computing,
    /// The engine has written the head of a stream and nothing of its body.
    Head,
    /// The engine has written a part of the body.
    Answering,
}

/// Where the other leg is held meanwhile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Other {
    /// Nowhere: it is as far as it can be.
    Free,
    /// Before its answer.
    Computing,
    /// In the middle of its answer.
    Midway,
}

/// One cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cell {
    pub dialect: Dialect,
    pub stream: bool,
    pub leg: Leg,
    pub failure: Failure,
    pub phase: Phase,
    pub other: Other,
}

/// What the client gets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Client {
    /// The whole answer.
    Whole,
    /// An engine's own refusal.
    Engine(u16),
    /// The gateway's refusal: status and `error`.
    Gateway(u16, String),
    /// A stream that begins and ends with this error.
    Ended(String),
    /// An answer that breaks off.
    Torn,
    /// Nothing: it left.
    Left,
}

/// Requests that the engines of a role have seen, and how each of them ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ends {
    /// How many at least: of a leg that is given up as soon as it is sent, its engine may see nothing.
    pub least: usize,
    /// How many at most, as the gateway counts.
    pub count: usize,
    /// One of these; several where the engines hear of it from the gateway or from each other, whoever is faster.
    pub any_of: &'static [LegEnd],
}

/// What a cell must come to.
#[derive(Clone, Debug)]
pub struct Expected {
    pub client: Client,
    pub prefill: Ends,
    pub decode: Ends,
    /// Everything that is counted, by [`super::stage::COUNTED`]; what is not named is 0.
    pub counted: Vec<(String, u64)>,
}

/// Every combination.
pub fn product() -> impl Iterator<Item = Cell> {
    use Failure::{Cut, Die, Hang, Leave, Refuse, RefuseOne, Slow, Status};
    use Phase::{Answering, Arrival, Computing, Connect, Head};
    let failures = [Refuse, RefuseOne, Status(422), Status(500), Hang, Die, Cut, Slow, Leave];
    let mut cells = Vec::new();
    for dialect in DIALECTS {
        for stream in [true, false] {
            for leg in [Leg::Prefill, Leg::Decode] {
                for failure in failures {
                    for phase in [Connect, Arrival, Computing, Head, Answering] {
                        for other in [Other::Free, Other::Computing, Other::Midway] {
                            cells.push(Cell { dialect, stream, leg, failure, phase, other });
                        }
                    }
                }
            }
        }
    }
    cells.into_iter()
}

/// Why a cell cannot be.
pub fn impossible(cell: Cell) -> Option<&'static str> {
    use Failure::{Cut, Die, Hang, Leave, Refuse, RefuseOne, Slow, Status};
    use Phase::{Answering, Arrival, Computing, Connect, Head};
    let at_once = cell.dialect.is_concurrent();
    let refuses = matches!(cell.failure, Refuse | RefuseOne);
    Some(match (cell.leg, cell.failure, cell.phase, cell.other) {
        (_, _, Connect, _) if !refuses => {
            "an engine that is not connected to does nothing; on loopback it is in no time"
        }
        (.., phase, _) if refuses && phase != Connect => "what is connected is not refused",
        (.., Head, _) if !cell.stream || cell.leg == Leg::Prefill => "the head of a whole answer comes with its body",
        (_, Status(_), Head | Answering, _) => "the status is written",
        (_, Cut, Arrival | Computing, _) => "no answer has begun that could end",
        (Leg::Prefill, Cut, ..) => "an answer with a length cannot end before it",
        (_, Cut, ..) if !cell.stream => "an answer with a length cannot end before it",
        (.., Other::Computing | Other::Midway) if !at_once => "there is one leg at a time",
        (_, Refuse | RefuseOne | Slow, _, Other::Computing | Other::Midway) => "nothing is told of a leg that is held",
        (Leg::Prefill, _, Arrival | Computing, Other::Computing | Other::Midway) => {
            "the decode leg waits for the prompt"
        }
        (Leg::Prefill, Leave, Answering, Other::Free) if at_once => "the decode leg is done, and the client has it all",
        (Leg::Decode, _, _, Other::Midway) => {
            "it is a prefill leg that fails while answering, seen from the other side"
        }
        (Leg::Decode, Hang | Die | Cut | Leave | Status(_), Computing | Head | Answering, Other::Computing) => {
            "nothing is decoded before it is prefilled"
        }
        _ => return None,
    })
}

impl Cell {
    /// The client has some of its answer when it happens.
    pub fn client_has_some(self) -> bool {
        match self.leg {
            Leg::Decode => self.phase == Phase::Answering,
            Leg::Prefill => self.other == Other::Midway,
        }
    }

    /// Both legs run, and the decode leg comes to its end before the prefill leg does.
    pub fn client_has_all(self) -> bool {
        let late = self.leg == Leg::Prefill && self.phase == Phase::Answering && self.other == Other::Free;
        late && self.dialect.is_concurrent() && self.failure != Failure::Slow
    }

    /// What the other leg is doing when it happens.
    pub fn beside(self) -> Beside {
        let at_once = self.dialect.is_concurrent();
        match self.leg {
            Leg::Prefill if !at_once => Beside::Absent,
            Leg::Prefill if self.client_has_all() => Beside::Done,
            Leg::Prefill => Beside::Running,
            // A bootstrap server waits until the decode engine has everything.
            Leg::Decode if self.phase == Phase::Arrival && self.dialect == Dialect::Bootstrap => Beside::Running,
            Leg::Decode if self.other != Other::Free => Beside::Running,
            Leg::Decode => Beside::Done,
        }
    }
}

/// What the other leg is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Beside {
    /// It has not begun, and never will.
    Absent,
    Running,
    /// It has ended well.
    Done,
}

/// What a cell must come to.
pub fn expected(cell: Cell) -> Expected {
    let (own, outcome, tries) = failing(cell);
    let other = beside(cell, tries);
    let own = Ends { least: tries, count: tries, any_of: own };
    let (prefill, decode) = match cell.leg {
        Leg::Prefill => (own, other.0),
        Leg::Decode => (other.0, own),
    };
    let client = client(cell);
    let (one, two) = if cell.leg == Leg::Prefill { ("prefill", "decode") } else { ("decode", "prefill") };
    let mut counted = vec![(format!("{one} {outcome}"), tries), (format!("{two} {}", other.1), other.0.count)];
    let mut count = |name: &str, count: usize| counted.push((name.to_owned(), count));
    let prefilled = cell.leg == Leg::Decode && cell.beside() == Beside::Done || cell.failure == Failure::Slow;
    count("prefill_duration", usize::from(prefilled));
    count("ai_pd_kv_params_found", usize::from(prefilled && cell.dialect == Dialect::NixlPull));
    let saw_body = client == Client::Whole || cell.client_has_some();
    count("decode_ttft", usize::from(cell.stream && saw_body));
    count("client_gone", usize::from(cell.failure == Failure::Leave));
    let breaks = matches!(cell.failure, Failure::Hang | Failure::Die | Failure::Cut);
    count("broken_answers", usize::from(breaks && cell.client_has_some()));
    let dies = matches!(cell.failure, Failure::Die | Failure::Cut);
    match cell.leg {
        Leg::Prefill => {
            count("prefill_ep_died", if dies { tries } else { 0 });
            count("prefill_retry", tries - 1);
        }
        Leg::Decode => {
            let silent = cell.failure == Failure::Hang && cell.client_has_some();
            count("decode_ep_died", usize::from(dies || silent));
            count("decode_zero_byte_eof", usize::from(dies && cell.phase == Phase::Head));
        }
    }
    if cell.dialect == Dialect::Bootstrap {
        let rejected = cell.leg == Leg::Prefill && cell.failure == Failure::Status(422);
        count("sg_prefill_reject_relay", usize::from(rejected));
        count("sg_room_retry", if cell.leg == Leg::Prefill { tries - 1 } else { 0 });
        count("sg_prefill_abort_decode", decodes_aborted(cell, tries));
    }
    let counted = counted.into_iter().filter(|(_, count)| *count > 0).map(|(name, count)| (name, count as u64));
    Expected { client, prefill, decode, counted: counted.collect() }
}

/// The failing leg: how it ends at its engine, how it is counted, and how often it is tried.
fn failing(cell: Cell) -> (&'static [LegEnd], &'static str, usize) {
    use LegEnd::{Cancelled, Died, Finished, Refused};
    let prefill = cell.leg == Leg::Prefill;
    // Before the client has a byte, a prefill leg is tried on another endpoint.
    let tries = if prefill && !cell.client_has_some() && !cell.client_has_all() { 2 } else { 1 };
    match cell.failure {
        Failure::Slow => (&[Finished], "ok", 1),
        Failure::Status(422) => (&[Refused], "rejected", 1),
        Failure::Status(_) => (&[Refused], "failed", tries),
        Failure::Die | Failure::Cut => (&[Died], "failed", tries),
        Failure::Leave => (&[Cancelled], "cancelled", 1),
        Failure::Hang if prefill => (&[Cancelled], "timeout", 1),
        // It is the prefill leg that waits too long, for this one.
        Failure::Hang if cell.beside() == Beside::Running => (CUT_OFF, "cancelled", 1),
        Failure::Hang if cell.client_has_some() => (&[Cancelled], "failed", 1),
        Failure::Hang => (&[Cancelled], "timeout", 1),
        Failure::Refuse | Failure::RefuseOne => unreachable!("refused connections have a table of their own"),
    }
}

/// A leg that was given up: its engine hears so from the gateway, or from the other engine.
const CUT_OFF: &[LegEnd] = &[LegEnd::Cancelled, LegEnd::Refused];

/// The other leg: how it ends at its engine, and how it is counted.
fn beside(cell: Cell, tries: usize) -> (Ends, &'static str) {
    use LegEnd::{Cancelled, Finished};
    let ends = |count, any_of| Ends { least: count, count, any_of };
    match cell.beside() {
        Beside::Absent if cell.failure != Failure::Slow => (ends(0, &[]), "ok"),
        _ if cell.failure == Failure::Slow => (ends(1, &[Finished]), "ok"),
        Beside::Absent | Beside::Done => (ends(1, &[Finished]), "ok"),
        // A prefill leg that waits for too long is what ends it.
        Beside::Running if cell.leg == Leg::Decode && cell.failure == Failure::Hang => {
            (ends(1, &[Cancelled]), "timeout")
        }
        Beside::Running if cell.leg == Leg::Decode => (ends(1, &[Cancelled]), "cancelled"),
        // The second one may be given up before its engine has looked.
        Beside::Running => (Ends { least: 1, count: tries, any_of: CUT_OFF }, "cancelled"),
    }
}

/// What the client gets.
fn client(cell: Cell) -> Client {
    use Failure::{Cut, Die, Hang, Leave, Refuse, RefuseOne, Slow, Status};
    let prefill_failed = match cell.dialect {
        Dialect::Bootstrap => "pd_sg_prefill_failed",
        _ => "pd_prefill_failed",
    };
    // An error before the first byte; after it an event that says so, where there are events.
    let told = |status: u16, before: &str, after: &str| match (cell.client_has_some(), cell.stream) {
        (false, _) => Client::Gateway(status, before.to_owned()),
        (true, true) => Client::Ended(after.to_owned()),
        (true, false) => Client::Torn,
    };
    match (cell.leg, cell.failure) {
        (_, Slow) => Client::Whole,
        (_, Leave) => Client::Left,
        _ if cell.client_has_all() => Client::Whole,
        (_, Status(422)) => Client::Engine(422),
        (Leg::Prefill, Status(_) | Die | Cut) => told(502, prefill_failed, prefill_failed),
        (Leg::Prefill, Hang) => told(504, "pd_prefill_timeout", prefill_failed),
        (Leg::Decode, Status(status)) => Client::Engine(status),
        (Leg::Decode, Hang) if cell.beside() == Beside::Running => told(504, "pd_prefill_timeout", prefill_failed),
        (Leg::Decode, Hang) => told(504, "pd_decode_timeout", "pd_idle_timeout"),
        (Leg::Decode, Die | Cut) => told(502, "pd_decode_backend_died", "pd_decode_backend_died"),
        (_, Refuse | RefuseOne) => unreachable!("refused connections have a table of their own"),
    }
}

/// SGLang's decode legs that were given up because of the prefill leg.
fn decodes_aborted(cell: Cell, tries: usize) -> usize {
    match (cell.leg, cell.failure) {
        (_, Failure::Leave | Failure::Slow) => 0,
        (Leg::Prefill, _) if cell.beside() == Beside::Running => tries,
        (Leg::Decode, Failure::Hang) if cell.beside() == Beside::Running => 1,
        _ => 0,
    }
}

/// What a request comes to whose connection is refused: by all endpoints of the leg, or by one of two.
pub fn refused(cell: Cell) -> Expected {
    let count = |name: &str, count: usize| (name.to_owned(), count as u64);
    let ends = |count: usize| Ends { least: count, count, any_of: &[LegEnd::Finished] };
    let pull = usize::from(cell.dialect == Dialect::NixlPull);
    if cell.failure == Failure::RefuseOne {
        let legs = [("prefill ok", 1), ("decode ok", 1), ("prefill_duration", 1), ("ai_pd_kv_params_found", pull)];
        let mut counted: Vec<_> = legs.iter().map(|(name, times)| count(name, *times)).collect();
        counted.push(count("decode_ttft", usize::from(cell.stream)));
        counted.push(count("connect_failover", 1));
        return Expected { client: Client::Whole, prefill: ends(1), decode: ends(1), counted };
    }
    // Where the legs run one after the other, the prompt is computed before the decode engine is found gone.
    let prefilled = usize::from(cell.leg == Leg::Decode && !cell.dialect.is_concurrent());
    let counted = vec![
        count("connect_failover", 2),
        count("prefill ok", prefilled),
        count("prefill_duration", prefilled),
        count("ai_pd_kv_params_found", prefilled * pull),
    ];
    let client = Client::Gateway(503, "pd_pool_unavailable".to_owned());
    Expected { client, prefill: ends(prefilled), decode: ends(0), counted }
}
