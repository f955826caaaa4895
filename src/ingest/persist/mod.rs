//! What warm engines hold, over a restart of the gateway: a file per rank with its keys and its last sequence number.
//!
//! An engine announces a block once and says nothing when it is used, so a gateway that starts anew knows nothing of a
//! warm engine unless somebody remembers. A rank's way: copied in slices between two cycles of its ingest thread
//! (`capture`) → put in order, written and renamed by a helper thread (`files`) → read and checked by it at the next
//! start (`format`) → taken up in slices before the rank's sockets are opened.
//!
//! **Taken up** keys are routed by at once, and are *unproven*: an engine that was restarted, or evicted them while
//! nobody listened, does not have them. They are proven by a replay from the last batch on, or by a first live batch
//! that follows it. Otherwise the rank is *degraded*: a key whose hit the engine's `usage` denies is withdrawn
//! ([`super::copies`]). Degraded ends with a proof, a restart or a clear of the engine, or the last unproven key.
//!
//! **Files** are named by all that tells ranks and readings of them apart, so rules over one rank share its file where they
//! read it alike, and only then; it goes with the last of them (`users`). Those that nobody uses for [`UNUSED_MAX`] are
//! removed, as are those of earlier releases, which do not say which event port they are of.
//!
//! **Limits.** A file has no more keys than an endpoint may have (`LOXILB_KV_MAX_BLOCKS`) and is refused beyond; one
//! rank per ingest thread is copied at a time; at most [`CHANGES_MAX`] changes meanwhile, beyond which the copy is given
//! up, counted, and tried again in the next period.

#![forbid(unsafe_code)]

mod capture;
mod files;
mod format;
mod users;

use std::path::PathBuf;
use std::time::Duration;

pub(crate) use capture::{Capture, Captured, Progress};
pub(crate) use files::{Answer, Files, Loaded, Write};
pub use format::check_any_state_file;
pub(crate) use format::{Identity, Image, KeptWay, digest};
pub(crate) use users::Share;

/// How long a file that no rule uses is kept: a rule that waits, or a name without an address, may use it again.
pub(crate) const UNUSED_MAX: Duration = Duration::from_secs(7 * 86_400);

/// Changes remembered while a rank is copied.
pub(crate) const CHANGES_MAX: usize = 1 << 20;

/// Where and how often ranks are written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateOptions {
    /// The directory; made if it is not there.
    pub directory: PathBuf,
    /// Time between two writings of a rank that changed.
    pub period: Duration,
}
