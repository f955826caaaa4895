//! The other ends of a gateway: simulated engines with real wire formats, and the load that is sent through it.
//!
//! `engine` shares no code with the gateway: it hashes, tokenizes, renders and encodes on its own, so that one mistake
//! cannot cancel out on both sides. A test reads its imports.

#![forbid(unsafe_code)]

pub mod assets;
pub mod child;
pub mod client;
pub mod demo;
pub mod engine;
mod epoll_rt;
mod glommio_rt;
pub mod replay;
pub mod report;
pub mod run;
pub mod trace;
pub mod workload;
