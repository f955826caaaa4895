//! What lies in the tokenizer directory, told apart by inode, time of change and size.

use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use shards::prompt::{ModelFiles, SLUG_BYTES_MAX};

/// The files of a model that are read, inside its directory.
const FILES: [&str; 4] =
    ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "additional_chat_templates/tool_use.jinja"];
/// Model directories that are looked at. Those beyond it, in the system's order, are as good as absent, and one
/// message says so.
const DIRECTORIES_MAX: usize = 1024;
/// Bytes of one file. A larger one is reported as damaged.
const FILE_BYTES_MAX: u64 = 256 * 1024 * 1024;

/// State of one model's files: two equal ones mean that nothing changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Staged {
    files: [Option<Stamp>; FILES.len()],
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Stamp {
    device: u64,
    inode: u64,
    changed: (i64, i64),
    modified: (i64, i64),
    bytes: u64,
    /// An unreadable file that becomes readable changes nothing else.
    mode: u32,
}

/// The tokenizer directory.
#[derive(Debug)]
pub(super) struct Directory {
    path: PathBuf,
    /// The last problem reported, so that it is reported once.
    problem: Option<String>,
}

impl Directory {
    pub(super) fn new(path: PathBuf) -> Self {
        Directory { path, problem: None }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Model directories by name. An unreadable directory is like an empty one, and said in the log once.
    pub(super) fn scan(&mut self) -> BTreeMap<String, Staged> {
        let (mut found, mut problem) = (BTreeMap::new(), None);
        match fs::read_dir(&self.path) {
            Ok(entries) => {
                for entry in entries.flatten() {
                    let Ok(name) = entry.file_name().into_string() else { continue };
                    if name.len() > SLUG_BYTES_MAX || !entry.path().is_dir() {
                        continue;
                    }
                    if found.len() == DIRECTORIES_MAX {
                        problem = Some(format!("more than {DIRECTORIES_MAX} directories: the rest is not used"));
                        break;
                    }
                    let stamps = FILES.map(|file| stamp(&entry.path().join(file)));
                    found.insert(name, Staged { files: stamps });
                }
            }
            Err(error) => problem = Some(error.to_string()),
        }
        if problem != self.problem {
            if let Some(problem) = &problem {
                tracing::warn!(
                    path = %self.path.display(),
                    problem,
                    "tokenizer directory: nothing is routed by KV cache without; name it as [tokenizers] dir of the \
                     configuration, with MODEL/tokenizer.json and tokenizer_config.json in it (the / of a model's name as __)"
                );
            }
            self.problem = problem;
        }
        found
    }
}

fn stamp(path: &Path) -> Option<Stamp> {
    let metadata = fs::metadata(path).ok()?;
    Some(Stamp {
        device: metadata.dev(),
        inode: metadata.ino(),
        changed: (metadata.ctime(), metadata.ctime_nsec()),
        modified: (metadata.mtime(), metadata.mtime_nsec()),
        bytes: metadata.len(),
        mode: metadata.mode(),
    })
}

/// Reads a model's files; the error is the file and what is wrong with it.
pub(super) fn read(slug: &str, staged: Option<&Staged>, directory: &Path) -> Result<ModelFiles, (PathBuf, String)> {
    let path = directory.join(slug);
    if shards::prompt::slug(slug).is_none() {
        return Err((path, "the model's name can be no directory".into()));
    }
    let Some(staged) = staged else {
        return Err((path.join(FILES[0]), "not found: stage the model's tokenizer there".into()));
    };
    let text = |n: usize| match &staged.files[n] {
        Some(_) => read_file(&path.join(FILES[n])).map(Some),
        None => Ok(None),
    };
    let Some(tokenizer) = text(0)? else {
        return Err((path.join(FILES[0]), "not found".into()));
    };
    let (config, template, tool_template) = (text(1)?, text(2)?, text(3)?);
    Ok(ModelFiles { slug: slug.to_owned(), path, tokenizer, config, template, tool_template })
}

fn read_file(path: &Path) -> Result<String, (PathBuf, String)> {
    let failed = |error: io::Error| (path.to_owned(), error.to_string());
    // To open a FIFO that nobody writes to would block the loader for ever; reads of a regular file are as ever.
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path).map_err(failed)?;
    if !file.metadata().map_err(failed)?.is_file() {
        return Err((path.to_owned(), "not a regular file".into()));
    }
    let mut bytes = Vec::new();
    file.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() as u64 > FILE_BYTES_MAX {
        return Err((path.to_owned(), format!("larger than {FILE_BYTES_MAX} bytes")));
    }
    String::from_utf8(bytes).map_err(|_| (path.to_owned(), "not UTF-8".into()))
}
