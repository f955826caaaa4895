//! Files of the gateway's own that survive a crash at any instant: read whole or not at all, replaced whole or not at all.

#![forbid(unsafe_code)]

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::Path;

/// The bytes of a regular file; none where there is no such file.
///
/// # Errors
/// `InvalidData`: it is no file, or has more than `bytes_max` bytes, which `too_large` says. Else the system's.
pub fn read(path: &Path, bytes_max: u64, too_large: &str) -> io::Result<Option<Vec<u8>>> {
    let invalid = |why: &str| io::Error::new(io::ErrorKind::InvalidData, why);
    // A pipe would keep the opener waiting for its other end.
    let file = match OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        file => file?,
    };
    if !file.metadata()?.is_file() {
        return Err(invalid("it is no file"));
    }
    let mut bytes = Vec::new();
    file.take(bytes_max.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > bytes_max {
        return Err(invalid(too_large));
    }
    Ok(Some(bytes))
}

/// Makes a directory that its owner alone may look into, with those above it; one that is there stays as it is.
///
/// # Errors
/// The system's.
pub fn make_directory(path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(path)
}

/// How names of files end that are being written.
const BESIDE: &str = ".new";

/// Removes from a directory what processes that are gone were writing when they were killed.
pub fn clear_up(directory: &Path) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let left = name.to_str().filter(|name| name.starts_with('.')).and_then(|name| name.strip_suffix(BESIDE));
        let writer = left.and_then(|name| name.rsplit('.').next()?.parse::<u32>().ok());
        // This process may be writing another file already.
        let is_gone = |process: u32| !Path::new("/proc").join(process.to_string()).exists();
        if writer.is_some_and(is_gone) {
            // What cannot be removed takes room and does no other harm.
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// Puts bytes in the place of a file in an existing directory, readable by its owner alone. They are on the disk when this
/// returns; until then the file is the one before.
///
/// # Errors
/// The system's; the file is then the one before.
pub fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let (Some(directory), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no file's path"));
    };
    let beside = directory.join(format!(".{}.{}{BESIDE}", name.display(), std::process::id()));
    let written = write_synced(&beside, bytes).and_then(|()| fs::rename(&beside, path));
    if written.is_err() {
        let _ = fs::remove_file(&beside);
    }
    written?;
    File::open(directory)?.sync_all()
}

fn write_synced(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}
