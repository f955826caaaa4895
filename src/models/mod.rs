//! The loader of tokenizers and chat templates: one helper thread that watches the tokenizer directory.
//!
//! **Invariant.** Only this thread reads the directory. It loads what rules name and what a request asked for, and
//! hands every change on as a new [`ModelTable`]; a table that was handed on never changes. A model that was loaded stays in
//! use while its directory is there, until its changed files are a whole model again: a copy under way, or one that went
//! wrong, takes no model away.

pub mod names;
mod scan;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use sha2::{Digest as _, Sha256};
use shards::prompt::{Entry, Model, ModelFiles, ModelTable, slug};

use scan::{Directory, Staged};

/// Time between two looks at the directory: a repaired file is used after at most this, the time the next look needs
/// to begin, and the load itself.
const SCAN_PERIOD: Duration = Duration::from_secs(1);
/// Time between two looks at what requests asked for.
const ASKED_PERIOD: Duration = Duration::from_millis(100);

/// What is known of one model, for the API.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelStatus {
    /// Name of its directory.
    pub slug: String,
    /// The directory, or the file that is missing, unreadable or damaged.
    pub path: PathBuf,
    /// Whether a rule names the model.
    pub named_by_rule: bool,
    /// Whether its directory is there.
    pub staged: bool,
    /// What became of it.
    pub state: ModelState,
}

/// What became of a model's files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ModelState {
    /// Loaded.
    Ready {
        /// Where its chat template comes from (`TemplateOrigin::name`).
        template: &'static str,
        /// The template is our own and unconfirmed.
        template_assumed: bool,
        /// Why its chats are routed without keys, if they are.
        template_problem: Option<String>,
        /// SHA-256 of its files, in hex: two gateways with the same one make the same of every prompt.
        digest: Arc<str>,
        /// What is wrong with the files that are there now; the model is the one of before.
        files_problem: Option<String>,
    },
    /// On disk; loaded when a rule names it or a request asks for it.
    Staged,
    /// Not usable, with the reason.
    Failed {
        /// What is wrong with the file at the status's path.
        reason: String,
    },
}

/// The loader's side that other threads hold: what is wanted, what came of it, and its end.
#[derive(Debug, Default)]
pub struct Control {
    shared: Mutex<Shared>,
    wake: Condvar,
    stop: AtomicBool,
}

#[derive(Debug, Default)]
struct Shared {
    wanted: BTreeSet<String>,
    wanted_changed: bool,
    table: Arc<ModelTable>,
    status: Vec<ModelStatus>,
}

impl Control {
    /// A loader's side before it runs.
    #[must_use]
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Says which models the rules name, as clients spell them. Names that can be no directory are reported as such.
    pub fn set_wanted(&self, models: impl IntoIterator<Item = String>) {
        let mut shared = self.lock();
        shared.wanted = models.into_iter().collect();
        shared.wanted_changed = true;
        self.wake.notify_all();
    }

    /// The table as of the last change.
    #[must_use]
    pub fn table(&self) -> Arc<ModelTable> {
        Arc::clone(&self.lock().table)
    }

    /// What is known of every model, in order of slug.
    #[must_use]
    pub fn status(&self) -> Vec<ModelStatus> {
        let (mut status, table) = {
            let shared = self.lock();
            (shared.status.clone(), Arc::clone(&shared.table))
        };
        for one in &mut status {
            // Stored blocks confirm a template without a change of the table.
            if let (ModelState::Ready { template_assumed, .. }, Some(Entry::Ready(model))) =
                (&mut one.state, table.get(&one.slug))
            {
                *template_assumed = model.template_assumed();
            }
        }
        status
    }

    /// Ends the loader after the model it may be reading.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        let _shared = self.lock();
        self.wake.notify_all();
    }

    /// The state behind the lock; a thread that died with it left whole values.
    fn lock(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Reads one model on the calling thread, for commands that run without a gateway; beside it, the digest of its files.
///
/// # Errors
/// A text that names the file and what is wrong with it.
pub fn read_now(directory: &Path, model: &str) -> Result<(Arc<Model>, Arc<str>), String> {
    let slug = slug(model).ok_or_else(|| format!("{model}: such a name can be no directory"))?;
    let staged = Directory::new(directory.to_owned()).scan().remove(&slug);
    load(&slug, staged.as_ref(), directory).map_err(|Fault { path, reason }| format!("{}: {reason}", path.display()))
}

/// The names of the directories in the tokenizer directory, in order.
#[must_use]
pub fn staged_now(directory: &Path) -> Vec<String> {
    Directory::new(directory.to_owned()).scan().into_keys().collect()
}

/// Starts the loader on a thread of its own. `pin` runs on that thread first; `on_change` gets every new table.
///
/// # Errors
/// The thread could not be started.
pub fn spawn(
    directory: PathBuf,
    control: Arc<Control>,
    pin: impl FnOnce() + Send + 'static,
    on_change: impl Fn(Arc<ModelTable>) + Send + 'static,
) -> std::io::Result<std::thread::JoinHandle<()>> {
    std::thread::Builder::new().name("models".into()).spawn(move || {
        pin();
        run(directory, &control, on_change);
    })
}

/// Watches the directory on the calling thread until [`Control::stop`].
pub fn run(directory: PathBuf, control: &Control, on_change: impl Fn(Arc<ModelTable>)) {
    let mut loader = Loader { directory: Directory::new(directory), known: BTreeMap::new() };
    let mut next_scan = Instant::now();
    while !control.stop.load(Ordering::Acquire) {
        let (wanted, changed, table) = {
            let mut shared = control.lock();
            let changed = std::mem::take(&mut shared.wanted_changed);
            (shared.wanted.clone(), changed, Arc::clone(&shared.table))
        };
        let asked = asked_for(&table);
        if changed || !asked.is_empty() || Instant::now() >= next_scan {
            // One model a round: a request for one does not wait for all the others.
            let more = loader.round(&wanted, &asked, |entries, status| {
                let table = Arc::new(ModelTable::new(entries));
                let mut shared = control.lock();
                shared.table = Arc::clone(&table);
                shared.status = status;
                drop(shared);
                on_change(table);
            });
            next_scan = Instant::now() + if more { Duration::ZERO } else { SCAN_PERIOD };
        }
        let shared = control.lock();
        if !shared.wanted_changed && !control.stop.load(Ordering::Acquire) && Instant::now() < next_scan {
            // Whether it was woken or timed out, the loop looks at everything again.
            drop(control.wake.wait_timeout(shared, ASKED_PERIOD));
        }
    }
}

/// Slugs of staged models that a request has asked for since the table was made.
fn asked_for(table: &ModelTable) -> BTreeSet<String> {
    let asked = table
        .entries()
        .filter(|(_, entry)| matches!(entry, Entry::Staged { wanted } if wanted.load(Ordering::Relaxed)));
    asked.map(|(slug, _)| slug.to_owned()).collect()
}

/// What the loader knows of one slug.
#[derive(Debug)]
struct Known {
    staged: Option<Staged>,
    named: bool,
    /// A request asked for it once: it is kept loaded.
    asked: bool,
    /// In use, with the digest of its files.
    loaded: Option<(Arc<Model>, Arc<str>)>,
    files: Files,
}

/// How what is in use stands to the files that are there.
#[derive(Debug)]
enum Files {
    /// They were not read since they changed.
    Unread,
    /// It is made of them.
    Read,
    /// They cannot be used.
    Unusable(Fault),
}

/// A file, and what is wrong with it.
#[derive(Clone, Debug)]
struct Fault {
    path: PathBuf,
    reason: String,
}

impl Known {
    fn new() -> Self {
        Known { staged: None, named: false, asked: false, loaded: None, files: Files::Unread }
    }

    fn is_wanted(&self) -> bool {
        self.named || self.asked
    }

    fn waits(&self) -> bool {
        self.is_wanted() && matches!(self.files, Files::Unread)
    }
}

struct Loader {
    directory: Directory,
    known: BTreeMap<String, Known>,
}

impl Loader {
    /// Looks at the directory and loads at most one model; hands on what changed. True when there is more to load.
    fn round(
        &mut self,
        wanted: &BTreeSet<String>,
        asked: &BTreeSet<String>,
        publish: impl FnOnce(Vec<(String, Entry)>, Vec<ModelStatus>),
    ) -> bool {
        let named: BTreeSet<String> = wanted.iter().map(|model| slug(model).unwrap_or_else(|| model.clone())).collect();
        let mut changed = self.compare(&named, asked);
        let mut waiting = self.known.iter_mut().filter(|(_, known)| known.waits());
        if let Some((slug, known)) = waiting.next() {
            known.files = match load(slug, known.staged.as_ref(), self.directory.path()) {
                Ok(loaded) => {
                    known.loaded = Some(loaded);
                    Files::Read
                }
                Err(fault) => {
                    let Fault { path, reason } = &fault;
                    let instead = match known.loaded {
                        Some(_) => "the model stays as it was loaded before",
                        None => "the model is routed without keys",
                    };
                    tracing::warn!(model = slug, path = %path.display(), reason, "{instead}");
                    Files::Unusable(fault)
                }
            };
            changed = true;
        }
        let more = waiting.next().is_some();
        if changed {
            publish(self.entries(), self.status());
        }
        more
    }

    /// Brings what is known in line with the directory and with what is wanted; true if anything changed.
    fn compare(&mut self, named: &BTreeSet<String>, asked: &BTreeSet<String>) -> bool {
        let mut staged = self.directory.scan();
        let slugs: BTreeSet<String> = staged.keys().chain(named).chain(self.known.keys()).cloned().collect();
        let mut changed = false;
        for slug in slugs {
            let found = staged.remove(&slug);
            let named = named.contains(&slug);
            if found.is_none() && !named {
                if self.known.remove(&slug).is_some() {
                    tracing::info!(model = slug, "the model's directory is gone");
                    changed = true;
                }
                continue;
            }
            let known = self.known.entry(slug.clone()).or_insert_with(|| {
                changed = true;
                Known::new()
            });
            changed |= known.named != named;
            known.named = named;
            known.asked |= asked.contains(&slug);
            if known.staged != found {
                // What is gone as a whole was taken away, and what nobody wants is not read again.
                if found.is_none() || !known.is_wanted() {
                    known.loaded = None;
                }
                known.staged = found;
                known.files = Files::Unread;
                changed = true;
            }
        }
        changed
    }

    fn entries(&self) -> Vec<(String, Entry)> {
        let entry = |known: &Known| match (&known.loaded, &known.files) {
            (Some((model, _)), _) => Entry::Ready(Arc::clone(model)),
            (None, Files::Unusable(Fault { path, reason })) => {
                Entry::Failed { path: path.clone(), reason: reason.clone() }
            }
            (None, _) => Entry::Staged { wanted: AtomicBool::new(false) },
        };
        self.known.iter().map(|(slug, known)| (slug.clone(), entry(known))).collect()
    }

    fn status(&self) -> Vec<ModelStatus> {
        let one = |(slug, known): (&String, &Known)| {
            let directory = self.directory.path().join(slug);
            let fault = match &known.files {
                Files::Unusable(fault) => Some(fault),
                Files::Unread | Files::Read => None,
            };
            let (path, state) = match (&known.loaded, fault) {
                (Some((model, digest)), fault) => (
                    directory,
                    ModelState::Ready {
                        template: model.template_origin().name(),
                        template_assumed: model.template_assumed(),
                        template_problem: model.template_problem(),
                        digest: Arc::clone(digest),
                        files_problem: fault.map(|fault| format!("{}: {}", fault.path.display(), fault.reason)),
                    },
                ),
                (None, Some(Fault { path, reason })) => (path.clone(), ModelState::Failed { reason: reason.clone() }),
                (None, None) => (directory, ModelState::Staged),
            };
            let staged = known.staged.is_some();
            ModelStatus { slug: slug.clone(), path, named_by_rule: known.named, staged, state }
        };
        self.known.iter().map(one).collect()
    }
}

/// Reads one model's files, and says in the log what became of a whole model.
fn load(slug: &str, staged: Option<&Staged>, directory: &Path) -> Result<(Arc<Model>, Arc<str>), Fault> {
    let began = Instant::now();
    let files = scan::read(slug, staged, directory).map_err(|(path, reason)| Fault { path, reason })?;
    let model = Model::load(&files, SystemTime::now)
        .map_err(|error| Fault { path: files.path.join(error.file), reason: error.reason })?;
    let (template, ms) = (model.template_origin().name(), began.elapsed().as_millis());
    tracing::info!(model = slug, template, ms, "tokenizer loaded");
    if let Some(problem) = model.template_problem() {
        tracing::warn!(model = slug, problem, "chats of this model are routed without keys");
    }
    Ok((Arc::new(model), digest(&files)))
}

/// SHA-256 of the texts of a model's files, in hex.
fn digest(files: &ModelFiles) -> Arc<str> {
    let mut hash = Sha256::new();
    for text in [Some(&files.tokenizer), files.config.as_ref(), files.template.as_ref(), files.tool_template.as_ref()] {
        // Where one ends and the next begins, and which are there, is part of it.
        hash.update(text.map_or(u64::MAX, |text| text.len() as u64).to_le_bytes());
        hash.update(text.map_or(&[][..], |text| text.as_bytes()));
    }
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect::<String>().into()
}

#[cfg(test)]
mod tests;
