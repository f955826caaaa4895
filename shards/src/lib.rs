//! Everything that runs on a kvlane data-plane core, or is read by one.
//!
//! **Invariant.** This crate knows nothing of configuration files, the management API or ZMQ: it is handed compiled
//! [`service::Tables`], listening sockets and read handles of inventories. The route decision in [`route`] is free
//! of I/O.

pub mod affinity;
pub mod belief;
pub mod block;
pub mod bos;
pub mod claims;
pub mod disagg;
pub mod executor;
pub mod feedback;
pub mod http;
pub mod ids;
pub mod inventory;
pub mod limits;
pub mod load;
pub mod predictions;
pub mod prompt;
pub mod proxy;
pub mod rates;
pub mod route;
pub mod service;
pub mod shard;
pub mod trie;
pub mod usage;
