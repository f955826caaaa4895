//! TensorRT-LLM's KV events as `POST /kv_cache_events` tells them: JSON objects, numbered per rank.

use serde_json::{Map, Value, json};

/// A TensorRT-LLM release as far as the event format depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub enum TrtllmRelease {
    /// A drain that finds nothing waits up to 2 s, as in 1.2.
    #[value(name = "1.1")]
    V1_1,
    /// Blocks have `mm_keys`.
    #[value(name = "1.2")]
    V1_2,
    /// A drain answers at once; blocks tell their salt; `/server_info` tells the block size.
    #[value(name = "1.3")]
    V1_3,
}

impl TrtllmRelease {
    /// The name it is asked for by.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::V1_1 => "1.1.0",
            Self::V1_2 => "1.2.1",
            Self::V1_3 => "1.3.0rc27",
        }
    }

    /// Whether a drain that finds nothing waits for something.
    #[must_use]
    pub fn drain_waits(self) -> bool {
        self < Self::V1_3
    }
}

/// One event, without number, window and rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The pool was made: blocks on the device and on the host.
    Created(u64, u64),
    /// Consecutive blocks were stored after `parent`.
    Stored {
        /// The block before the first.
        parent: Option<u64>,
        /// Each block's name and tokens.
        blocks: Vec<(u64, Vec<u32>)>,
        /// The request's salt.
        salt: Option<String>,
    },
    /// Blocks were evicted.
    Removed(Vec<u64>),
    /// A block went from one level to another: 0 is the device, 1 the host.
    Moved {
        /// Its name.
        hash: u64,
        /// Where it was.
        from: u64,
        /// Where it is.
        to: u64,
    },
    /// What no engine says: a stored event whose blocks are a string.
    Malformed,
}

/// What the drain says of an event: number `id`, in the pool of `window` tokens, of a rank where there are several.
#[must_use]
pub fn encode(release: TrtllmRelease, event: &Event, id: u64, window: u64, rank: Option<u64>) -> Value {
    let data = match event {
        Event::Created(device, host) => json!({"type": "created", "num_blocks_per_cache_level": [device, host]}),
        Event::Stored { parent, blocks, salt } => {
            let blocks: Vec<Value> =
                blocks.iter().map(|(hash, tokens)| block(release, *hash, tokens, salt.as_deref())).collect();
            json!({"type": "stored", "parent_hash": parent, "blocks": blocks})
        }
        Event::Removed(hashes) => json!({"type": "removed", "block_hashes": hashes}),
        Event::Moved { hash, from, to } => {
            let diff = |old: u64, new: u64| json!({"type": "event_diff", "new_value": new, "old_value": old});
            json!({"type": "updated", "block_hash": hash, "cache_level": diff(*from, *to), "priority": diff(35, 35)})
        }
        Event::Malformed => json!({"type": "stored", "parent_hash": null, "blocks": "no list"}),
    };
    let mut event = json!({"event_id": id, "data": data, "window_size": window});
    if let Some(rank) = rank {
        event["attention_dp_rank"] = json!(rank);
    }
    event
}

fn block(release: TrtllmRelease, hash: u64, tokens: &[u32], salt: Option<&str>) -> Value {
    let token = |id: &u32| json!({"type": "unique_token", "token_id": id, "token_extra_id": 0});
    let mut block = Map::new();
    block.insert("type".to_owned(), json!("stored_block"));
    block.insert("block_hash".to_owned(), json!(hash));
    block.insert("tokens".to_owned(), tokens.iter().map(token).collect());
    block.insert("cache_level".to_owned(), json!(0));
    block.insert("priority".to_owned(), json!(35));
    if release >= TrtllmRelease::V1_2 {
        block.insert("mm_keys".to_owned(), json!([]));
    }
    if let Some(salt) = salt.filter(|_| release >= TrtllmRelease::V1_3) {
        block.insert("cache_salt".to_owned(), json!(salt));
    }
    Value::Object(block)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::testing::vectors;

    fn event(data: &Value) -> Option<Event> {
        let hashes = |list: &Value| list.as_array()?.iter().map(Value::as_u64).collect::<Option<Vec<_>>>();
        Some(match data["type"].as_str()? {
            "created" => {
                let levels = hashes(&data["num_blocks_per_cache_level"])?;
                Event::Created(*levels.first()?, *levels.get(1)?)
            }
            "removed" => Event::Removed(hashes(&data["block_hashes"])?),
            "updated" => Event::Moved {
                hash: data["block_hash"].as_u64()?,
                from: data["cache_level"]["old_value"].as_u64()?,
                to: data["cache_level"]["new_value"].as_u64()?,
            },
            _ => {
                let block = |block: &Value| {
                    let tokens = block["tokens"].as_array()?.iter();
                    let ids = tokens.map(|token| Some(token["token_id"].as_u64()? as u32)).collect::<Option<_>>()?;
                    Some((block["block_hash"].as_u64()?, ids))
                };
                let blocks: &[Value] = data["blocks"].as_array()?;
                Event::Stored {
                    parent: data["parent_hash"].as_u64(),
                    blocks: blocks.iter().map(block).collect::<Option<_>>()?,
                    salt: blocks[0]["cache_salt"].as_str().map(str::to_owned),
                }
            }
        })
    }

    #[test]
    fn entries_are_those_of_the_vectors() {
        let vectors = vectors("trtllm_events.json");
        let mut checked = 0;
        for case in vectors.as_array().expect("a list of cases") {
            let release = match case["era"].as_str() {
                Some("1.1-1.2") => TrtllmRelease::V1_1,
                Some("1.2-1.3") => TrtllmRelease::V1_2,
                Some("1.3" | "1.3-v1" | "any") => TrtllmRelease::V1_3,
                _ => continue,
            };
            for entry in case["input"]["body"].as_array().expect("a drain is a list") {
                // Images, and what only the newest manager leaves out, are not simulated.
                let images = entry["data"]["blocks"].as_array().into_iter().flatten();
                let special =
                    images.into_iter().any(|block| block["mm_keys"].as_array().is_some_and(|k| !k.is_empty()));
                let priority = entry["data"]["type"] == "updated" && entry["data"]["priority"].is_null();
                let (Some(event), false) = (event(&entry["data"]), special || priority) else { continue };
                let (id, window) = (entry["event_id"].as_u64().expect("a number"), entry["window_size"].as_u64());
                let Some(window) = window else { continue };
                let ours = encode(release, &event, id, window, entry["attention_dp_rank"].as_u64());
                // Members stand in the same order, as the text shows.
                assert_eq!(ours.to_string(), entry.to_string(), "{}", case["name"]);
                checked += 1;
            }
        }
        assert!(checked >= 20, "only {checked} entries were compared");
    }
}
