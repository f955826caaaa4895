//! KV event streams of the engines → inventories.

mod copies;
mod counts;
mod events;
mod msgpack;
mod poller;
mod sockets;
mod status;
mod stream;
