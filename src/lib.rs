//! The process around the shards: command line, configuration, rules, ingest, management API, supervision.
//!
//! **Invariant.** Dependencies point one way, from here to [`shards`]: a shard is handed compiled tables, sockets
//! and read handles, and never a file, a rule or an environment variable.

pub mod access;
pub mod admin;
pub mod cli;
pub mod config;
pub mod cores;
pub mod discovery;
mod durable;
pub mod fields;
pub mod hash_command;
pub mod health;
pub mod ingest;
pub mod logs;
pub mod models;
pub mod rules;
pub mod supervise;
