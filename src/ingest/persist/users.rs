//! Who uses which state file: several rules may be over one rank, and what one of them leaves the others still need.
//!
//! **Invariant.** A file is removed only when nobody uses it. Of those who do, the one that came first writes it: it has
//! heard most, so that a rule made later never puts its few keys in the place of many.

#![forbid(unsafe_code)]

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::format::Identity;

/// All users of all files; the ingest threads and the helper share it. A lock is held for one look-up.
#[derive(Clone, Debug, Default)]
pub(super) struct Users(Arc<Mutex<All>>);

#[derive(Debug, Default)]
struct All {
    next: u64,
    files: HashMap<String, Used>,
}

/// What is known of a file in use.
#[derive(Debug, Default)]
struct Used {
    /// In order of their coming.
    users: Vec<u64>,
    /// It was written, or read.
    on_disk: bool,
    /// It was, and is not any more.
    is_missing: bool,
}

/// One rank's use of its file.
#[derive(Debug)]
pub(crate) struct Share {
    pub(super) identity: Identity,
    pub(super) file: String,
    number: u64,
}

impl Users {
    fn lock(&self) -> MutexGuard<'_, All> {
        // Every change under the lock is whole.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn join(&self, identity: Identity) -> Share {
        let file = identity.file_name();
        let mut all = self.lock();
        let number = all.next;
        all.next += 1;
        all.files.entry(file.clone()).or_default().users.push(number);
        Share { identity, file, number }
    }

    /// Ends a use; true where it was the last one of the file.
    pub(super) fn leave(&self, share: &Share) -> bool {
        let mut all = self.lock();
        let Some(used) = all.files.get_mut(&share.file) else { return true };
        used.users.retain(|number| *number != share.number);
        let is_last = used.users.is_empty();
        if is_last {
            all.files.remove(&share.file);
        }
        is_last
    }

    /// Whether this user writes the file.
    pub(super) fn writes(&self, share: &Share) -> bool {
        self.lock().files.get(&share.file).is_some_and(|used| used.users.first() == Some(&share.number))
    }

    /// Whether this user writes the file, and it is gone from the disk.
    pub(super) fn misses(&self, share: &Share) -> bool {
        let all = self.lock();
        all.files.get(&share.file).is_some_and(|used| used.is_missing && used.users.first() == Some(&share.number))
    }

    pub(super) fn is_used(&self, file: &str) -> bool {
        self.lock().files.contains_key(file)
    }

    /// The file is on the disk.
    pub(super) fn is_on_disk(&self, file: &str) {
        if let Some(used) = self.lock().files.get_mut(file) {
            (used.on_disk, used.is_missing) = (true, false);
        }
    }

    /// These files are on the disk, and no others.
    pub(super) fn found(&self, names: &HashSet<String>) {
        for (file, used) in &mut self.lock().files {
            used.is_missing = used.on_disk && !names.contains(file);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_of_several_writes_and_the_last_one_ends_the_file() {
        let users = Users::default();
        let identity = super::super::format::tests::identity;
        let (one, two) = (users.join(identity()), users.join(identity()));
        let other = users.join(Identity { source: "tcp://10.0.0.1:5558".to_owned(), ..identity() });
        assert_ne!(one.file, other.file);
        assert_eq!([&one, &two, &other].map(|share| users.writes(share)), [true, false, true]);
        users.found(&HashSet::new());
        assert!(!users.misses(&one), "it was never there");
        users.is_on_disk(&one.file);
        users.found(&HashSet::from([one.file.clone()]));
        assert!(!users.misses(&one));
        users.found(&HashSet::new());
        assert_eq!([&one, &two].map(|share| users.misses(share)), [true, false]);
        assert!(!users.leave(&one));
        assert!(users.writes(&two) && users.misses(&two) && users.is_used(&two.file));
        users.is_on_disk(&two.file);
        assert!(!users.misses(&two));
        assert!(users.leave(&two) && !users.is_used(&two.file));
    }
}
