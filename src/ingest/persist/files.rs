//! The helper thread that reads and writes state files, so that nobody else waits for a disk.
//!
//! A file is written beside its place, synced, and renamed into it: there is always a whole one. Files are readable by
//! their owner alone. One that cannot be taken up is told in the log; a damaged one is moved aside (`….damaged`).

#![forbid(unsafe_code)]

use std::collections::HashSet;
use std::fs;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, RecvTimeoutError, Sender, bounded};

use super::super::poller::Waker;
use super::super::status::StreamStats;
use super::capture::Captured;
use super::format::{self, Identity, Image, Unusable};
use super::users::{Share, Users};
use super::{StateOptions, UNUSED_MAX};
use crate::durable;

/// Requests that wait. Beyond it a rank starts without its file, or is written in the next period.
const REQUESTS_MAX: usize = 16_384;

const TOO_LARGE: &str = "it is larger than any that LOXILB_KV_MAX_BLOCKS allows";

/// What the helper is asked for.
enum Request {
    /// Read a rank's file.
    Load(Identity, Answer),
    /// Write it.
    Write(Box<Write>),
    /// Remove a file, unless somebody uses it.
    Forget(String),
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

/// The way to the helper thread, which ends when nobody has one; and who uses which file.
#[derive(Clone, Debug)]
pub(crate) struct Files {
    requests: Sender<Request>,
    users: Users,
    /// Nobody's files stay: rules that are not in force yet may be over their ranks.
    keeps: Arc<AtomicBool>,
}

impl Files {
    /// Starts the thread. What files there are is looked at every `period`.
    ///
    /// # Errors
    /// Where no thread can be had.
    pub(crate) fn start(options: StateOptions, blocks_max: usize) -> io::Result<(Self, JoinHandle<()>)> {
        let (requests, receiver) = bounded(REQUESTS_MAX);
        let users = Users::default();
        let StateOptions { directory, period } = options;
        let helper = Helper { directory, period, bytes_max: format::bytes_max(blocks_max), users: users.clone() };
        let thread = std::thread::Builder::new().name("state".to_owned()).spawn(move || helper.run(&receiver))?;
        Ok((Files { requests, users, keeps: Arc::default() }, thread))
    }

    /// Whether files stay that nobody uses any more, until nobody has used them for long; to be set by whoever knows.
    pub(crate) fn keeps(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.keeps)
    }

    /// Begins to use a rank's file.
    pub(crate) fn join(&self, identity: Identity) -> Share {
        self.users.join(identity)
    }

    /// Ends a use; the file stays.
    pub(crate) fn leave(&self, share: &Share) {
        self.users.leave(share);
    }

    /// Ends a use; with the last one the file goes.
    pub(crate) fn forget(&self, share: Share) {
        if self.users.leave(&share) && !self.keeps.load(Ordering::Relaxed) {
            // Where it cannot be asked for the file stays, and goes when nobody has used it for long.
            let _ = self.requests.try_send(Request::Forget(share.file));
        }
    }

    /// Whether this user writes the file.
    pub(crate) fn writes(&self, share: &Share) -> bool {
        self.users.writes(share)
    }

    /// Whether this user writes the file, and it was removed by somebody else.
    pub(crate) fn misses(&self, share: &Share) -> bool {
        self.users.misses(share)
    }

    /// Asks for a rank's file; false where too much is asked for already.
    pub(crate) fn load(&self, share: &Share, answer: Answer) -> bool {
        self.requests.try_send(Request::Load(share.identity.clone(), answer)).is_ok()
    }

    /// Asks for a file to be written; false where too much is asked for already.
    pub(crate) fn write(&self, write: Write) -> bool {
        self.requests.try_send(Request::Write(Box::new(write))).is_ok()
    }

    /// As [`write`](Files::write), waiting for room: for the end of a thread.
    pub(crate) fn write_at_last(&self, write: Write) {
        // The helper lives as long as somebody can ask it.
        let _ = self.requests.send(Request::Write(Box::new(write)));
    }
}

struct Helper {
    directory: PathBuf,
    /// How often the directory is looked at.
    period: Duration,
    bytes_max: usize,
    users: Users,
}

impl Helper {
    fn run(&self, requests: &Receiver<Request>) {
        if let Err(error) = durable::make_directory(&self.directory) {
            tracing::error!(
                directory = %self.directory.display(), %error,
                "[state] directory cannot be made: nothing that engines hold is remembered over a restart"
            );
        }
        self.clear_up();
        let mut next_look = Instant::now() + self.period;
        loop {
            match requests.recv_deadline(next_look) {
                Ok(request) => self.obey(request),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            // Under a storm of requests as well.
            if Instant::now() >= next_look {
                self.look();
                next_look = Instant::now() + self.period;
            }
        }
    }

    fn obey(&self, request: Request) {
        match request {
            Request::Load(identity, answer) => {
                let Answer { token, stats, loaded, waker } = answer;
                let image = self.load(&identity, &stats).map(Box::new);
                // The asker may be gone.
                let _ = loaded.send(Loaded { token, image });
                waker.wake();
            }
            Request::Write(write) => self.write(*write),
            Request::Forget(file) => {
                // Somebody may have come meanwhile; and it may never have been written.
                if !self.users.is_used(&file) {
                    let _ = fs::remove_file(self.directory.join(file));
                }
            }
        }
    }

    /// Removes what a killed process left half written, and files of earlier releases.
    fn clear_up(&self) {
        durable::clear_up(&self.directory);
        let of_an_earlier_release = |name: &str| {
            let digest = name.strip_prefix("kv-").and_then(|name| name.strip_suffix(".state"));
            digest.is_some_and(|digest| digest.len() == 16)
        };
        let old = self.files().into_iter().filter(|(name, _)| of_an_earlier_release(name));
        let removed = old.filter(|(name, _)| fs::remove_file(self.directory.join(name)).is_ok()).count();
        if removed > 0 {
            tracing::warn!(
                files = removed,
                "state files of an earlier release do not say which event port they are of: they are removed, and ranks \
                 start without them"
            );
        }
    }

    /// Names of files that may be of ranks, and how long ago each was written.
    fn files(&self) -> Vec<(String, Duration)> {
        let entries = fs::read_dir(&self.directory).into_iter().flatten().flatten();
        let file = |entry: fs::DirEntry| {
            let name = entry.file_name().into_string().ok().filter(|name| name.starts_with("kv-"))?;
            let written = entry.metadata().ok()?.modified().ok()?;
            Some((name, written.elapsed().unwrap_or_default()))
        };
        entries.filter_map(file).collect()
    }

    /// Says which files are missing, and removes those that nobody has used for long.
    fn look(&self) {
        let mut names = HashSet::new();
        for (name, age) in self.files() {
            if age > UNUSED_MAX && !self.users.is_used(&name) {
                // One that cannot be removed is tried again.
                let _ = fs::remove_file(self.directory.join(&name));
            }
            names.insert(name);
        }
        self.users.found(&names);
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
            Ok(image) => {
                self.users.is_on_disk(&identity.file_name());
                Some(image)
            }
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
        let file = identity.file_name();
        match durable::replace(&self.directory.join(&file), &format::encode(&identity, &image)) {
            Ok(()) => {
                self.users.is_on_disk(&file);
                stats.state_written();
            }
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
