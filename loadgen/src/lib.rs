//! Load generator, simulated engines and the demo.

pub mod client;
mod epoll_rt;
mod glommio_rt;
pub mod replay;
pub mod report;
pub mod run;
pub mod trace;
pub mod workload;
