//! What is counted of disaggregated requests, by the names of the reference's metrics.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::route::Why;
use crate::service::count;

/// Upper bounds of the histograms' buckets, milliseconds; one more bucket is without bound.
pub const BUCKETS_MS: [u64; 12] = [5, 10, 25, 50, 100, 250, 500, 1_000, 2_500, 10_000, 30_000, 120_000];

/// How long something took, over all requests of a shard.
#[derive(Debug, Default)]
pub struct Histogram {
    /// By [`BUCKETS_MS`], each alone.
    pub buckets: [AtomicU64; BUCKETS_MS.len() + 1],
    /// All together, microseconds.
    pub sum_us: AtomicU64,
}

impl Histogram {
    /// Notes one. To be called by the row's own shard.
    pub fn note(&self, time: Duration) {
        let place = BUCKETS_MS.iter().position(|bound| time.as_millis() <= u128::from(*bound));
        count(&self.buckets[place.unwrap_or(BUCKETS_MS.len())]);
        let sum = self.sum_us.load(Ordering::Relaxed).wrapping_add(time.as_micros() as u64);
        self.sum_us.store(sum, Ordering::Relaxed);
    }
}

/// How one leg came out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum LegOutcome {
    /// Its answer came to its end.
    Ok,
    /// The engine answered with an error of the client's (4xx).
    Rejected,
    /// The engine died, answered with an error of its own, or broke off.
    Failed,
    /// It took too long.
    TimedOut,
    /// The client left, or the other leg failed.
    Cancelled,
}

impl LegOutcome {
    /// Every outcome, in the order of the counters.
    pub const ALL: [LegOutcome; 5] =
        [LegOutcome::Ok, LegOutcome::Rejected, LegOutcome::Failed, LegOutcome::TimedOut, LegOutcome::Cancelled];

    /// The label value.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            LegOutcome::Ok => "ok",
            LegOutcome::Rejected => "rejected",
            LegOutcome::Failed => "failed",
            LegOutcome::TimedOut => "timeout",
            LegOutcome::Cancelled => "cancelled",
        }
    }
}

macro_rules! events {
    ($($(#[$doc:meta])* $field:ident => $metric:literal,)*) => {
        /// Counters of one service on one shard.
        #[derive(Debug, Default)]
        pub struct PdStats {
            /// Prefill legs by [`LegOutcome`].
            pub prefill: [AtomicU64; LegOutcome::ALL.len()],
            /// Decode legs by [`LegOutcome`].
            pub decode: [AtomicU64; LegOutcome::ALL.len()],
            /// Requests that a decode endpoint did alone, or was to, by [`Why`].
            pub bypassed: [AtomicU64; Why::ALL.len()],
            /// Time of prefill legs that ended well.
            pub prefill_time: Histogram,
            /// Time from a decode leg's dispatch to its first byte.
            pub decode_ttft: Histogram,
            $($(#[$doc])* pub $field: AtomicU64,)*
        }

        impl PdStats {
            /// The plain counters with the names of their series.
            #[must_use]
            pub fn series(&self) -> Vec<(&'static str, &AtomicU64)> {
                vec![$(($metric, &self.$field),)*]
            }

            /// Requests that a decode endpoint would have been sooner done with alone.
            #[must_use]
            pub fn bypass_chosen(&self) -> u64 {
                let all = self.bypassed.iter().chain([&self.bypass_explored]);
                all.map(|count| count.load(Ordering::Relaxed)).sum()
            }
        }
    };
}

events! {
    /// Prefill answers with parameters for the decode leg.
    params_found => "loxilb_ai_pd_kv_params_found",
    /// Prefill answers without: the decode leg computes the prompt again.
    params_missing => "loxilb_ai_pd_kv_params_missing",
    /// Requests refused for want of places (429).
    admission_shed => "loxilb_pd_admission_shed",
    /// Requests that waited for a place.
    admission_queued => "loxilb_pd_admission_queued",
    /// Requests refused because all queues were full (429).
    admission_overflow_shed => "loxilb_pd_admission_overflow_shed",
    /// Legs sent again to the same endpoint because a kept connection had ended.
    connect_retry_same_ep => "loxilb_pd_connect_retry_same_ep",
    /// Those of them that were answered.
    connect_retry_same_ep_ok => "loxilb_pd_connect_retry_same_ep_ok",
    /// Prefill legs whose endpoint died.
    prefill_ep_died => "loxilb_pd_prefill_ep_died",
    /// Decode legs whose endpoint died.
    decode_ep_died => "loxilb_pd_decode_ep_died",
    /// Decode answers that ended in good order without a byte of a body.
    decode_zero_byte_eof => "loxilb_pd_decode_zero_byte_eof",
    /// Requests that were served whole, because no pair of endpoints was usable or they cannot be parted.
    fallback_to_normal => "loxilb_pd_fallback_to_normal",
    /// Requests that went through both legs although a decode endpoint would be sooner done alone: to learn of.
    bypass_explored => "kvlane_pd_bypass_explored",
    /// Requests that went through both legs after all, since the decode endpoint that was to do them alone failed.
    bypass_failed => "kvlane_pd_bypass_failed",
    /// Prefill legs that were tried again elsewhere, in a new room or under a new number.
    prefill_retry => "loxilb_pd_prefill_retry",
    /// SGLang's of them.
    sg_room_retry => "loxilb_pd_sg_room_retry",
    /// SGLang's decode legs that were cancelled because the prefill leg failed.
    sg_prefill_abort_decode => "loxilb_pd_sg_prefill_abort_decode",
    /// SGLang's prefill answers that were read to their end after the decode leg's.
    sg_decode_close_drain => "loxilb_pd_sg_decode_close_drain",
    /// SGLang's prefill refusals that the client got.
    sg_prefill_reject_relay => "loxilb_pd_sg_prefill_reject_relay",
    /// SGLang's bodies that could not be edited.
    sg_oversize_reject => "loxilb_pd_sg_oversize_reject",
    /// TensorRT-LLM's contexts that ended their answers by themselves.
    trt_ctx_early_exit => "loxilb_pd_trt_ctx_early_exit",
}
