//! The process around the shards: command line, configuration, rules, ingest, management API, supervision.

pub mod models;
