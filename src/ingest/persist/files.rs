//! The helper thread that reads and writes state files, so that nobody else waits for a disk.
//!
//! A file is written beside its place, synced, and renamed into it: there is always a whole one. Files are readable by
//! their owner alone. One that cannot be taken up is told in the log; a damaged one is moved aside (`….damaged`).

#![forbid(unsafe_code)]

use std::fs;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use crossbeam::channel::{Receiver, Sender, bounded};

use super::super::poller::Waker;
use super::super::status::StreamStats;
use super::capture::Captured;
use super::format::{self, Identity, Image, Unusable};
use crate::durable;

/// Requests that wait. Beyond it a rank starts without its file, or is written in the next period.
const REQUESTS_MAX: usize = 16_384;

const TOO_LARGE: &str = "it is larger than any that LOXILB_KV_MAX_BLOCKS allows";

/// What the helper is asked for.
pub(crate) enum Request {
    /// Read a rank's file.
    Load(Identity, Answer),
    /// Write it.
    Write(Box<Write>),
    /// Remove it: the rank is gone from its rule.
    Forget(Identity),
}

/// What is to be written.
pub(crate) struct Write {
    pub(crate) identity: Identity,
    /// All but the groups.
    pub(crate) image: Image,
    pub(crate) groups: Captured,
    pub(crate) stats: Arc<StreamStats>,
    /// Unset when it is done.
    pub(crate) busy: Arc<AtomicBool>,
}

/// Where what was read goes.
pub(crate) struct Answer {
    /// The source that waits for it.
    pub(crate) token: u64,
    pub(crate) stats: Arc<StreamStats>,
    pub(crate) loaded: Sender<Loaded>,
    pub(crate) waker: Waker,
}

/// What was read.
pub(crate) struct Loaded {
    pub(crate) token: u64,
    /// None: the rank starts without.
    pub(crate) image: Option<Box<Image>>,
}

/// The way to the helper thread; it ends when nobody has one.
#[derive(Clone, Debug)]
pub(crate) struct Files(Sender<Request>);

impl Files {
    /// Starts the thread.
    ///
    /// # Errors
    /// Where no thread can be had.
    pub(crate) fn start(directory: PathBuf, blocks_max: usize) -> io::Result<(Self, JoinHandle<()>)> {
        let (requests, receiver) = bounded(REQUESTS_MAX);
        let helper = Helper { directory, bytes_max: format::bytes_max(blocks_max) };
        let thread = std::thread::Builder::new().name("state".to_owned()).spawn(move || helper.run(&receiver))?;
        Ok((Files(requests), thread))
    }

    /// Asks for something; false where too much is asked for already.
    pub(crate) fn ask(&self, request: Request) -> bool {
        self.0.try_send(request).is_ok()
    }

    /// As [`ask`](Files::ask), waiting for room: for the end of a thread.
    pub(crate) fn ask_at_last(&self, request: Request) {
        // The helper lives as long as somebody can ask it.
        let _ = self.0.send(request);
    }
}

struct Helper {
    directory: PathBuf,
    bytes_max: usize,
}

impl Helper {
    fn run(&self, requests: &Receiver<Request>) {
        if let Err(error) = durable::make_directory(&self.directory) {
            tracing::error!(
                directory = %self.directory.display(), %error,
                "[state] directory cannot be made: nothing that engines hold is remembered over a restart"
            );
        }
        for request in requests {
            match request {
                Request::Load(identity, answer) => {
                    let Answer { token, stats, loaded, waker } = answer;
                    let image = self.load(&identity, &stats).map(Box::new);
                    // The asker may be gone.
                    let _ = loaded.send(Loaded { token, image });
                    waker.wake();
                }
                Request::Write(write) => self.write(*write),
                Request::Forget(identity) => {
                    // It may never have been written.
                    let _ = fs::remove_file(self.directory.join(identity.file_name()));
                }
            }
        }
    }

    fn load(&self, identity: &Identity, stats: &StreamStats) -> Option<Image> {
        let path = self.directory.join(identity.file_name());
        let bytes = match durable::read(&path, self.bytes_max as u64, TOO_LARGE) {
            Ok(bytes) => bytes?,
            Err(error) => {
                stats.state_failure();
                tracing::warn!(
                    endpoint = identity.endpoint, rank = identity.rank, file = %path.display(), %error,
                    "the state file cannot be read: the rank starts without it"
                );
                if error.kind() == io::ErrorKind::InvalidData {
                    // Out of the way of the next one.
                    let _ = fs::rename(&path, path.with_extension("state.damaged"));
                }
                return None;
            }
        };
        match format::decode(&bytes, identity) {
            Ok(image) => Some(image),
            Err(why) => {
                stats.state_failure();
                let kept = match why {
                    Unusable::Other(_) => "it is left where it is until it is written anew",
                    _ => "it is moved aside",
                };
                tracing::warn!(
                    endpoint = identity.endpoint, rank = identity.rank, file = %path.display(), %why,
                    "the state file is not taken up: the rank starts without it; {kept}"
                );
                if !matches!(why, Unusable::Other(_)) {
                    // Should that fail, it is overwritten in time.
                    let _ = fs::rename(&path, path.with_extension("state.damaged"));
                }
                None
            }
        }
    }

    fn write(&self, write: Write) {
        let Write { identity, mut image, groups, stats, busy } = write;
        image.groups = groups.into_groups();
        match durable::replace(&self.directory.join(identity.file_name()), &format::encode(&identity, &image)) {
            Ok(()) => stats.state_written(),
            Err(error) => {
                stats.state_failure();
                tracing::warn!(
                    endpoint = identity.endpoint, rank = identity.rank, directory = %self.directory.display(), %error,
                    "the state file cannot be written: after a restart the rank starts with an older one, or without"
                );
            }
        }
        busy.store(false, Ordering::Release);
    }
}
