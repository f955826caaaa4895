//! The streams of a service without sockets: frames go in by hand, and take the way that they take in an ingest
//! thread. For benchmarks, which must not measure the library and the kernel in between.

#![forbid(unsafe_code)]

use std::sync::Arc;

use shards::ids::{EndpointIndex, Rank, ServiceId};
use shards::inventory::Writer;

use super::calibrate::Believed;
use super::copies::Copies;
use super::framing;
use super::sockets::Link;
use super::source::Source;
use super::status::{StreamName, StreamStatus};
use super::{Mode, RankSource};

/// How many streams a [`Feed`] has, and what is said of them.
#[derive(Clone, Debug)]
pub struct FeedShape {
    /// Endpoints of the service.
    pub endpoints: u16,
    /// Streams per endpoint.
    pub ranks: u8,
    /// The rule's `kvBlockSize`, tokens.
    pub block_tokens: u32,
    /// Most (rank, group, key) entries kept per endpoint.
    pub max_blocks_per_endpoint: usize,
    /// What the rule says of the engines' keys; none: they are taken as they come.
    pub believed: Option<Arc<Believed>>,
}

/// The streams of one service, all of them connected, none with a replay address.
pub struct Feed {
    writer: Writer,
    endpoints: Vec<(Copies, Vec<Source>)>,
}

impl Feed {
    /// Streams that have brought nothing yet; holders are numbered endpoint by endpoint, rank by rank.
    #[must_use]
    pub fn new(shape: &FeedShape, mut writer: Writer) -> Self {
        let endpoints = (0..shape.endpoints).map(|endpoint| {
            let mut copies = Copies::new(
                usize::from(shape.ranks),
                shape.block_tokens,
                shape.max_blocks_per_endpoint,
                shape.believed.as_ref(),
            );
            let by_use = Arc::default();
            let sources = (0..shape.ranks).map(|rank| {
                let name = StreamName {
                    service: ServiceId(0),
                    endpoint: EndpointIndex(endpoint),
                    label: format!("feed {endpoint}"),
                    rank: Rank(rank),
                    address: String::new(),
                };
                let from = RankSource { rank: Rank(rank), mode: Mode::Connect(String::new()), replay: None };
                let mut source = Source::new(name, from, usize::from(rank), 0, &by_use, &mut writer);
                for link in [Link::Opened(0), Link::Ready] {
                    source.linked(link, &mut copies, &mut writer);
                }
                source
            });
            let sources = sources.collect();
            (copies, sources)
        });
        let endpoints = endpoints.collect();
        Feed { writer, endpoints }
    }

    /// A message that an engine's publisher has sent, frame by frame.
    ///
    /// # Panics
    /// Where the shape has no such stream.
    pub fn message(&mut self, endpoint: u16, rank: u8, frames: &[&[u8]]) {
        let (copies, sources) = &mut self.endpoints[usize::from(endpoint)];
        sources[usize::from(rank)].published(framing::published(frames), copies, &mut self.writer);
    }

    /// Publishes all that is pending; true when readers see it. False: a reader still reads the other side.
    pub fn publish(&mut self) -> bool {
        while self.writer.pending() > 0 {
            if !self.writer.try_publish() {
                return false;
            }
        }
        true
    }

    /// State and counters of one stream.
    ///
    /// # Panics
    /// Where the shape has no such stream.
    #[must_use]
    pub fn status(&self, endpoint: u16, rank: u8) -> StreamStatus {
        let (copies, sources) = &self.endpoints[usize::from(endpoint)];
        let source = &sources[usize::from(rank)];
        let mut status = source.stats.status(&source.name);
        status.finding = copies.finding(usize::from(rank)).cloned();
        status
    }
}

impl std::fmt::Debug for Feed {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Feed").field("endpoints", &self.endpoints.len()).finish_non_exhaustive()
    }
}
