//! The management plane of a gateway process: its API row by row, the clients of the reference, rules that outlive the
//! process, and who is let in.

#[path = "../common/mod.rs"]
mod common;

mod access;
mod churn;
mod crowds;
mod examples;
mod files;
mod loxicmd;
mod rows;
mod secrets;
mod silent;
mod state;
