//! What engines say of their load in `GET /metrics`.

use std::collections::BTreeMap;

use shards::service::Engine;

/// The load of an engine, all its ranks together; what it does not say is none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineMetrics {
    /// Requests that wait.
    pub queued: Option<u32>,
    /// Blocks of its caches.
    pub blocks: Option<u32>,
}

/// Whether an engine may be asked for its metrics. TensorRT-LLM's are emptied by reading them, and llama.cpp's say nothing
/// that is of use here.
#[must_use]
pub fn has_metrics(engine: Engine) -> bool {
    matches!(engine, Engine::Vllm | Engine::Sglang)
}

/// Reads the Prometheus text of an engine.
#[must_use]
pub fn read_metrics(engine: Engine, text: &str) -> EngineMetrics {
    let (queued, rank) = match engine {
        Engine::Vllm => ("vllm:num_requests_waiting", "engine"),
        Engine::Sglang => ("sglang:num_queue_reqs", "dp_rank"),
        Engine::Trtllm | Engine::Llamacpp => return EngineMetrics::default(),
    };
    let blocks = match engine {
        Engine::Vllm => {
            sum_by_rank(text, "vllm:cache_config_info", rank, |sample| sample.label("num_gpu_blocks")?.parse().ok())
        }
        _ => sum_by_rank(text, "sglang:num_pages", rank, |sample| sample.value()),
    };
    EngineMetrics { queued: sum_by_rank(text, queued, rank, |sample| sample.value()), blocks }
}

/// The sum over ranks of the largest value of each: processes that share a rank may all report it.
fn sum_by_rank(text: &str, name: &str, rank: &str, read: impl Fn(&Sample<'_>) -> Option<u32>) -> Option<u32> {
    let mut ranks: BTreeMap<&str, u32> = BTreeMap::new();
    for sample in text.lines().filter_map(|line| Sample::of(line, name)) {
        let Some(value) = read(&sample) else { continue };
        let most = ranks.entry(sample.label(rank).unwrap_or_default()).or_default();
        *most = value.max(*most);
    }
    (!ranks.is_empty()).then(|| ranks.values().fold(0, |sum: u32, value| sum.saturating_add(*value)))
}

/// One line of the text.
#[derive(Clone, Copy)]
struct Sample<'a> {
    /// Between the braces; empty without.
    labels: &'a str,
    value: &'a str,
}

impl<'a> Sample<'a> {
    /// The line, if it is a sample of the metric.
    fn of(line: &'a str, name: &str) -> Option<Self> {
        let rest = line.strip_prefix(name)?;
        match rest.strip_prefix('{') {
            Some(rest) => {
                let (labels, value) = rest.rsplit_once('}')?;
                Some(Sample { labels, value: value.trim() })
            }
            None => rest.strip_prefix(' ').map(|value| Sample { labels: "", value: value.trim() }),
        }
    }

    /// Its value as a count.
    fn value(&self) -> Option<u32> {
        let number: f64 = self.value.split(' ').next()?.parse().ok()?;
        (number.is_finite() && number >= 0.0).then_some(number.min(f64::from(u32::MAX)) as u32)
    }

    /// The value of a label, as it stands.
    fn label(&self, name: &str) -> Option<&'a str> {
        let mut rest = self.labels;
        loop {
            let (label, after) = rest.split_once("=\"")?;
            let (value, after) = after.split_once('"')?;
            if label.trim_start_matches([',', ' ']) == name {
                return Some(value);
            }
            rest = after;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ranks_of_an_engine_are_added_up() {
        let text = "# TYPE vllm:num_requests_waiting gauge\n\
            vllm:num_requests_waiting{engine=\"0\",model_name=\"a\"} 3.0\n\
            vllm:num_requests_waiting{engine=\"1\",model_name=\"a\"} 4.0\n\
            vllm:num_requests_waiting_by_reason{engine=\"0\",reason=\"capacity\"} 99.0\n\
            vllm:cache_config_info{block_size=\"16\",engine=\"0\",num_gpu_blocks=\"1000\"} 1.0\n\
            vllm:cache_config_info{block_size=\"16\",engine=\"1\",num_gpu_blocks=\"1500\"} 1.0\n";
        assert_eq!(read_metrics(Engine::Vllm, text), EngineMetrics { queued: Some(7), blocks: Some(2500) });
        let text = "sglang:num_queue_reqs{dp_rank=\"0\",tp_rank=\"0\"} 2\nsglang:num_queue_reqs{dp_rank=\"0\",tp_rank=\"1\"} 2\n\
            sglang:num_queue_reqs{dp_rank=\"1\",tp_rank=\"0\"} 5\nsglang:num_pages{dp_rank=\"0\"} 640.0\n";
        assert_eq!(read_metrics(Engine::Sglang, text), EngineMetrics { queued: Some(7), blocks: Some(640) });
    }

    #[test]
    fn what_is_not_said_or_makes_no_sense_is_not_known() {
        for text in [
            "",
            "vllm:num_requests_waiting",
            "vllm:num_requests_waiting{engine=\"0\"",
            "<html>",
            "vllm:num_requests_waiting{engine=\"0\"} NaN",
            "vllm:num_requests_waiting{engine=\"0\"} -1",
        ] {
            assert_eq!(read_metrics(Engine::Vllm, text), EngineMetrics::default(), "{text}");
        }
        let text = "vllm:num_requests_waiting 1\nvllm:cache_config_info{num_gpu_blocks=\"None\"} 1.0";
        assert_eq!(read_metrics(Engine::Vllm, text), EngineMetrics { queued: Some(1), blocks: None });
        assert_eq!(read_metrics(Engine::Trtllm, text), EngineMetrics::default());
        assert!(has_metrics(Engine::Sglang) && !has_metrics(Engine::Trtllm) && !has_metrics(Engine::Llamacpp));
    }
}
