//! One client connection, request by request: route, forward, relay, watch.
//!
//! **Invariant.** Load is reserved before anything of an attempt is awaited and given back on every way out. A request
//! is sent at most three times, again only if not a byte of an answer came the first time and sending it again is
//! harmless. After the first byte of an answer nothing is retried, and an answer that breaks never ends cleanly.
//!
//! ```text
//!  idle ─head, body─▶ pick ─▶ score ─▶ decide ─▶ connect ─▶ send ─▶ head ─▶ relay ─▶ idle
//!                                        ▲          │ refused    │ died without a byte
//!                                        └──────────┴────────────┘
//! ```

mod answer;
mod ask;
mod asked;
mod claiming;
mod client;
mod evidence;
mod exchange;
mod handed;
mod known;
mod legs;
mod models;
mod outgoing;
mod relay;
mod routes;
mod score;
mod session;
mod upstream;
mod watch;

use std::cell::{Cell, RefCell};
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;

use monoio::net::TcpStream;

use crate::affinity::{Affinity, LocalAffinity};
use crate::claims::Claims;
use crate::disagg::context::RequestNumbers;
use crate::executor::{Aside, Ticket, breathe, turn};
use crate::ids::ShardId;
use crate::limits::Limits;
use crate::load::LoadTable;
use crate::prompt::{PrefixCache, PrefixStats};
use crate::service::Tables;

pub use client::is_ours;
use client::{Awaited, Buffers, Client, Incoming};
pub use evidence::tier_name;
use exchange::Next;
use routes::Routes;
use upstream::Pools;
use watch::Connections;
pub use watch::SWEEP_EVERY;

/// Everything the connections of one shard share; it never leaves the shard's thread.
pub struct Proxy {
    id: ShardId,
    limits: Limits,
    loads: Arc<LoadTable>,
    claims: Arc<Claims>,
    routes: RefCell<Rc<Routes>>,
    pools: Pools,
    connections: Rc<Connections>,
    buffers: Buffers,
    ticket: Ticket,
    prefixes: RefCell<PrefixCache>,
    aside: Option<Aside>,
    asked: Rc<asked::Asked>,
    draining: Cell<bool>,
    affinity: RefCell<LocalAffinity>,
    request_ids: outgoing::RequestIds,
    disagg_numbers: RequestNumbers,
    /// Decisions so far, for what takes turns.
    turns: Cell<u32>,
}

impl Proxy {
    /// A proxy without rules. What is too large to be done in slices it does aside, or, without such a thread, in one go.
    #[must_use]
    pub fn new(
        id: ShardId,
        limits: Limits,
        loads: Arc<LoadTable>,
        claims: Arc<Claims>,
        affinity: &Arc<Affinity>,
        aside: Option<Aside>,
    ) -> Self {
        let request_ids = outgoing::RequestIds::default();
        let prefixes = RefCell::new(PrefixCache::new(limits.prompt_cache_bytes));
        Proxy {
            id,
            limits,
            loads,
            claims,
            routes: RefCell::new(Rc::new(Routes::empty())),
            pools: Pools::default(),
            connections: Rc::default(),
            buffers: Buffers::default(),
            ticket: Ticket::new(),
            prefixes,
            aside,
            asked: Rc::default(),
            draining: Cell::new(false),
            disagg_numbers: RequestNumbers::new(id, request_ids.random() as u8),
            request_ids,
            affinity: RefCell::new(LocalAffinity::new(affinity)),
            turns: Cell::new(0),
        }
    }

    /// Serves with these tables from now on; requests under way finish on the old ones.
    pub fn set_tables(&self, tables: &Tables) {
        let before = Rc::clone(&self.routes.borrow());
        let routes = Routes::compile(tables, &before, self.id, &self.pools);
        self.routes.replace(Rc::new(routes));
    }

    /// Serves one client connection that came in at `listen` to its end.
    pub async fn serve(self: Rc<Self>, stream: TcpStream, listen: SocketAddr) {
        // Without a place the connection is closed at once: the shard is full of busy ones.
        let Some(place) = self.connections.open(self.limits.connections_max) else { return };
        // An answer is written in one piece; a failure here means that the client is gone already.
        if stream.set_nodelay(true).is_err() {
            return;
        }
        let mut client = Client::new(stream, place);
        let mut awaited = Awaited::First;
        loop {
            let request = match client.next_request(&self.limits, awaited, &self.buffers).await {
                Incoming::Request(request) => request,
                Incoming::Refused(refusal) => return client.refuse(&refusal, &self.limits).await,
                Incoming::Closed => return,
            };
            breathe().await;
            awaited = match exchange::exchange(&self, &mut client, request, listen).await {
                // The answer's head went out before the drain began and promised more: a request may be on its way.
                Next::Request if self.draining.get() => Awaited::Last,
                Next::Request => Awaited::Further,
                Next::Close => return,
            };
        }
    }

    /// Client connections open now.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.connections.count()
    }

    /// What is remembered of prompts, and what came of it.
    #[must_use]
    pub fn prompt_stats(&self) -> PrefixStats {
        self.prefixes.borrow().stats()
    }

    /// From now on idle connections are closed and the others after an answer that says so: the one they are at, or, if
    /// its head has gone out without, the next, which is waited for for a second at most.
    pub fn drain(&self) {
        self.draining.set(true);
        self.connections.close_idle();
    }

    /// Ends every connection, whatever it is at.
    pub fn cut(&self) {
        self.connections.cut();
    }

    /// Enforces deadlines and closes idle upstream connections; to be called every [`SWEEP_EVERY`].
    pub async fn sweep(&self) {
        self.pools.sweep(self.limits.upstream_idle_max);
        self.routes().look_after(self.id);
        let mut from = 0;
        while let Some(next) = self.connections.sweep(from) {
            from = next;
            turn().await;
        }
    }

    fn routes(&self) -> Rc<Routes> {
        Rc::clone(&self.routes.borrow())
    }
}
