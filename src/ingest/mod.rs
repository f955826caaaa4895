//! KV event streams of the engines → inventories.

mod events;
mod msgpack;
