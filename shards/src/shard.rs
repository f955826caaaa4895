//! One data-plane thread: its ring, its listeners, its commands.

use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use crate::ids::ShardId;
use crate::limits::Limits;
use crate::load::LoadTable;
use crate::service::Tables;

/// What a shard is started with.
#[derive(Debug)]
pub struct ShardOptions {
    /// Its number.
    pub id: ShardId,
    /// The core it is pinned to; none = not pinned.
    pub core: Option<usize>,
    /// Entries of its ring.
    pub ring_entries: u32,
    /// Its bounds.
    pub limits: Limits,
    /// In-flight counts of the process.
    pub loads: Arc<LoadTable>,
}

/// What the control core tells a shard; each command is answered when it has taken effect.
#[derive(Debug)]
pub enum Command {
    /// Serve with these tables from now on.
    Tables(Arc<Tables>),
    /// Accept on this (non-blocking, listening) socket.
    Listen(SocketAddr, TcpListener),
    /// Stop accepting on the address; established connections go on.
    Unlisten(SocketAddr),
    /// Accept nothing new, finish what runs, then stop; cut what is left after the time.
    Drain(Duration),
}
