//! The rules that outlive the process: one file under `[state] directory`, written before a change is acknowledged.
//!
//! **Invariant.** The file is replaced whole: written beside, synced, renamed, and its directory synced. Whenever the
//! process dies, it holds the last acknowledged rules, or those and the one change that was under way. A file that is
//! not what was written (its digest says so) is moved aside and never half used.
//!
//! Besides rules made over the API it holds the numbers and ids of all rules, so that they stay what they were.
//!
//! A rule that cannot be put in force waits: it stays in the file, and is tried again every [`RETRY_PERIOD`].

use std::collections::{HashMap, HashSet};
use std::fs;
use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use serde_json::Value;
use shards::ids::ServiceId;
use tracing::{error, info, warn};
use xxhash_rust::xxh3::xxh3_64;

use crate::durable;
use crate::fields::{Problem, from_json};
use crate::rules::{KvDefaults, PathMatchMode, Rule, RuleKey, check_request};

use super::registry::Remembered;
use super::{Entry, Origin, Supervisor};

/// The file's name in the directory.
const FILE: &str = "rules.json";
/// The first word of the file and the version of its format.
const MAGIC: &str = "kvlane-rules 1";
/// How often rules that wait are tried again: a busy port may be free by then.
const RETRY_PERIOD: Duration = Duration::from_secs(5);
/// Rules that are tried in one go. The others have their turn the next time.
const RETRIES_MAX: usize = 16;
/// Largest file that is read, bytes: 8,192 endpoints with long texts need a tenth. A larger one counts as damaged.
const BYTES_MAX: u64 = 256 << 20;

/// Why rules could not be written; the change is refused, because it would not survive a crash.
#[derive(Debug, thiserror::Error)]
#[error("the rules cannot be written to {}: {source}", path.display())]
pub struct KeepError {
    path: PathBuf,
    source: io::Error,
}

/// A rule as the file has it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct KeptRule {
    service_id: u32,
    id: String,
    key: KeptKey,
    /// The API body that makes the rule; none for the configuration file's.
    body: Option<Value>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct KeptKey {
    ip: IpAddr,
    port: u16,
    block: u32,
    host: String,
    path_prefix: String,
    path_match_mode: String,
    model_name: String,
}

#[derive(Debug, Default, Serialize, Deserialize)]
struct Content {
    /// Number of the next new rule.
    next: u32,
    rules: Vec<KeptRule>,
}

impl KeptKey {
    fn of(key: &RuleKey) -> Self {
        KeptKey {
            ip: key.ip,
            port: key.port,
            block: key.block,
            host: key.host.clone(),
            path_prefix: key.path_prefix.clone(),
            path_match_mode: key.path_match.name().to_owned(),
            model_name: key.model.clone(),
        }
    }

    fn key(&self) -> RuleKey {
        RuleKey {
            ip: self.ip,
            port: self.port,
            block: self.block,
            host: self.host.clone(),
            path_prefix: self.path_prefix.clone(),
            path_match: PathMatchMode::of_name(&self.path_match_mode).unwrap_or_default(),
            model: self.model_name.clone(),
        }
    }
}

impl KeptRule {
    fn of(entry: &Entry) -> Self {
        KeptRule {
            service_id: entry.id.0,
            id: entry.uuid.to_string(),
            key: KeptKey::of(&entry.rule.key),
            body: match &entry.origin {
                Origin::File => None,
                Origin::Api(body) => Some(Value::clone(body)),
            },
        }
    }
}

/// The file, and what it has that is not in force.
#[derive(Debug, Default)]
pub(super) struct Store {
    path: Option<PathBuf>,
    /// What the file has now.
    written: Option<Vec<u8>>,
    /// Rules of the API that are not in force, those first that are tried next. They stay in the file until they are
    /// deleted or made anew.
    waiting: Vec<Waiting>,
    /// When rules that wait are tried again.
    retry_at: Option<Instant>,
    /// Where a damaged file was put.
    damaged: Option<PathBuf>,
}

/// A rule that the file has and that is not in force.
#[derive(Clone, Debug)]
struct Waiting {
    rule: KeptRule,
    /// Why not; empty while it was not tried.
    why: String,
}

impl Waiting {
    fn new(rule: KeptRule) -> Self {
        Waiting { rule, why: String::new() }
    }

    fn key(&self) -> RuleKey {
        self.rule.key.key()
    }
}

/// What of the state file an operator should know.
#[derive(Clone, Debug, Default)]
pub struct KeptReport {
    /// The file; none without `[state] directory`: rules of the API end with the process.
    pub file: Option<PathBuf>,
    /// Rules that the file has and that could not be put in force, each with the reason; they are tried again every 5 s.
    pub waiting: Vec<(RuleKey, String)>,
    /// Where a file was put that could not be read.
    pub damaged: Option<PathBuf>,
}

impl KeptReport {
    /// What is to be said where rules of the API end with the process.
    #[must_use]
    pub fn passing(&self) -> Option<&'static str> {
        const PASSING: &str =
            "rules made over the API end with the process: name a [state] directory in the configuration file";
        self.file.is_none().then_some(PASSING)
    }
}

impl Store {
    /// Reads the file of a directory; what cannot be read is moved aside.
    pub(super) fn open(directory: Option<&Path>) -> (Self, u32, HashMap<RuleKey, Remembered>) {
        let Some(directory) = directory else { return (Store::default(), 0, HashMap::new()) };
        let path = directory.join(FILE);
        let mut store = Store { path: Some(path.clone()), ..Store::default() };
        let content = match durable::read(&path, BYTES_MAX, "it is too large")
            .and_then(|bytes| bytes.map(|bytes| decode(bytes, &mut store)).transpose())
        {
            Ok(content) => content.unwrap_or_default(),
            Err(why) => {
                store.damaged = Some(put_aside(&path));
                error!(file = %path.display(), kept_as = ?store.damaged, %why,
                    "the rules of the last run cannot be read: none of them is in force");
                Content::default()
            }
        };
        let remember = |rule: &KeptRule| {
            (rule.key.key(), Remembered { id: ServiceId(rule.service_id), uuid: Arc::from(rule.id.as_str()) })
        };
        let remembered = content.rules.iter().map(remember).collect();
        store.waiting = content.rules.into_iter().filter(|rule| rule.body.is_some()).map(Waiting::new).collect();
        (store, content.next, remembered)
    }

    /// Whether rules wait to be put in force.
    pub(super) fn some_wait(&self) -> bool {
        !self.waiting.is_empty()
    }

    fn report(&self) -> KeptReport {
        KeptReport {
            file: self.path.clone(),
            waiting: self.waiting.iter().map(|waiting| (waiting.key(), waiting.why.clone())).collect(),
            damaged: self.damaged.clone(),
        }
    }

    /// What the file should have when these entries are in force.
    fn content(&self, entries: &[Arc<Entry>], next: u32) -> Content {
        let mut rules: Vec<KeptRule> = entries.iter().map(|entry| KeptRule::of(entry)).collect();
        let waits = |rule: &&KeptRule| !entries.iter().any(|entry| KeptKey::of(&entry.rule.key) == rule.key);
        rules.extend(self.waiting.iter().map(|waiting| &waiting.rule).filter(waits).cloned());
        rules.sort_by_key(|rule| rule.service_id);
        Content { next, rules }
    }
}

impl Supervisor {
    /// Writes what is to be in force after a restart; nothing where it is written already.
    pub(super) async fn keep(&mut self, entries: &[Arc<Entry>]) -> Result<(), KeepError> {
        let Some(path) = self.store.path.clone() else { return Ok(()) };
        let content = self.store.content(entries, self.registry.next());
        let error = |source| KeepError { path: path.clone(), source };
        let bytes = encode(&content).map_err(error)?;
        if self.store.written.as_ref() == Some(&bytes) {
            return Ok(());
        }
        let at = path.clone();
        // The disk may take its time; only whoever waits for the change waits for it.
        let written = tokio::task::spawn_blocking(move || put(&at, &bytes).map(|()| bytes)).await;
        let written = written.map_err(|why| error(io::Error::other(why)))?;
        // Whatever is there now, it is not known to be what was there before.
        self.store.written = None;
        self.store.written = Some(written.map_err(error)?);
        Ok(())
    }

    /// Puts the rules of the last run that came over the API in force again. The configuration file's are there already
    /// and win; a rule that is refused waits.
    pub async fn take_up(&mut self, patience: Instant) {
        for waiting in self.store.waiting.clone() {
            let rule = waiting.key();
            if self.registry.find(&rule).is_some() {
                warn!(%rule, "the configuration file has this rule of the API now, and wins");
            } else if let Err(why) = self.try_waiting(waiting, patience).await {
                error!(%rule, why, "a rule of the last run is not in force: it waits");
            }
        }
        self.store.retry_at = Some(Instant::now() + RETRY_PERIOD);
        self.forget_waiting();
        self.forget_numbers();
        let entries = self.registry.entries().to_vec();
        if let Err(error) = self.keep(&entries).await {
            error!(%error, "rules made from now on are refused until they can be kept");
        }
        self.publish();
        let (rules, waiting) = (self.registry.entries().len(), self.store.waiting.len());
        info!(rules, waiting, kept = ?self.store.path, "rules");
    }

    /// Tries rules that wait again, if it is time. What becomes of them is shown in the view.
    pub(super) async fn retry_waiting(&mut self) {
        let now = Instant::now();
        if self.store.waiting.is_empty() || self.store.retry_at.is_some_and(|at| now < at) {
            return;
        }
        self.store.retry_at = Some(now + RETRY_PERIOD);
        let tried: Vec<Waiting> = self.store.waiting.iter().take(RETRIES_MAX).cloned().collect();
        for waiting in tried {
            let (rule, before) = (waiting.key(), waiting.why.clone());
            match self.try_waiting(waiting, now).await {
                Ok(()) => info!(%rule, "a rule that waited is in force"),
                Err(why) if why != before => warn!(%rule, why, "a rule waits on"),
                Err(_) => {}
            }
        }
        self.publish();
    }

    /// Tries to put a rule that waits in force; why not, where it waits on. All the while it stays in the list, and so in
    /// the file.
    async fn try_waiting(&mut self, mut waiting: Waiting, patience: Instant) -> Result<(), String> {
        let result = match checked(&waiting, &self.defaults) {
            Ok((rule, origin)) => self.apply_at_start(&rule, &origin, patience).await.map_err(|why| why.to_string()),
            // A file that it names may come to be where it must lie.
            Err(why) => Err(why),
        };
        if let Err(why) = &result {
            waiting.why.clone_from(why);
            let key = waiting.key();
            self.store.waiting.retain(|other| other.key() != key);
            self.store.waiting.push(waiting);
        }
        result
    }

    /// Forgets waiting rules that are in force by now.
    pub(super) fn forget_waiting(&mut self) {
        let registry = &self.registry;
        self.store.waiting.retain(|waiting| registry.find(&waiting.key()).is_none());
    }

    /// Forgets the numbers of rules that are neither in force nor wait.
    fn forget_numbers(&mut self) {
        let waiting: HashSet<RuleKey> = self.store.waiting.iter().map(Waiting::key).collect();
        self.registry.forget_all_but(&waiting);
    }

    /// Takes waiting rules out of the file: one by its key, or all. How many there were.
    pub(super) fn drop_waiting(&mut self, key: Option<&RuleKey>) -> usize {
        let before = self.store.waiting.len();
        self.store.waiting.retain(|waiting| key.is_some_and(|key| waiting.key() != *key));
        self.forget_numbers();
        before - self.store.waiting.len()
    }

    /// What of the state file an operator should know.
    pub(super) fn kept_report(&self) -> KeptReport {
        self.store.report()
    }
}

/// The rule that a body makes, or why it makes none.
fn checked(waiting: &Waiting, defaults: &KvDefaults) -> Result<(Rule, Origin), String> {
    let body = waiting.rule.body.as_ref().ok_or("it has no body")?;
    let rule = from_json(body.to_string().as_bytes())
        .map_err(|problem| vec![problem])
        .and_then(|node| check_request(&node, defaults))
        .map_err(|problems| problems.iter().map(Problem::to_string).collect::<Vec<_>>().join("; "));
    match rule? {
        (rule, _) if rule.key == waiting.key() => Ok((rule, Origin::Api(Arc::new(body.clone())))),
        _ => Err("by its body it is for something else".to_owned()),
    }
}

fn encode(content: &Content) -> io::Result<Vec<u8>> {
    let body = serde_json::to_vec_pretty(content)?;
    let mut bytes = format!("{MAGIC} {:016x}\n", xxh3_64(&body)).into_bytes();
    bytes.extend(body);
    Ok(bytes)
}

fn decode(bytes: Vec<u8>, store: &mut Store) -> io::Result<Content> {
    let invalid = |why: &str| io::Error::new(io::ErrorKind::InvalidData, why);
    let end = bytes.iter().position(|byte| *byte == b'\n').ok_or_else(|| invalid("it has no first line"))?;
    let (line, body) = (&bytes[..end], &bytes[end + 1..]);
    let digest =
        line.strip_prefix(MAGIC.as_bytes()).ok_or_else(|| invalid("it is of another version, or no such file"))?;
    if digest != format!(" {:016x}", xxh3_64(body)).as_bytes() {
        return Err(invalid("its digest does not fit"));
    }
    let content = serde_json::from_slice(body)?;
    store.written = Some(bytes);
    Ok(content)
}

fn put(path: &Path, bytes: &[u8]) -> io::Result<()> {
    durable::make_directory(path.parent().unwrap_or(Path::new(".")))?;
    durable::replace(path, bytes)
}

/// Moves a file to where the next one does not replace it, and says where.
fn put_aside(path: &Path) -> PathBuf {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis();
    let aside = path.with_extension(format!("json.damaged-{now}"));
    if let Err(error) = fs::rename(path, &aside) {
        warn!(file = %path.display(), %error, "the damaged file cannot be moved aside, and will be replaced");
    }
    aside
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scratch(name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("kvlane-kept-{name}-{}", std::process::id()));
        fs::create_dir_all(&path).expect("the temporary directory is writable");
        path
    }

    fn content() -> Content {
        let key = KeptKey {
            ip: "127.0.0.1".parse().expect("an address"),
            port: 8080,
            block: 0,
            host: "a.example".to_owned(),
            path_prefix: "/v1".to_owned(),
            path_match_mode: "prefix".to_owned(),
            model_name: String::new(),
        };
        let body = Some(serde_json::json!({"serviceArguments": {}}));
        Content { next: 9, rules: vec![KeptRule { service_id: 4, id: "u".into(), key, body }] }
    }

    #[test]
    fn what_is_written_is_read_again() {
        let directory = scratch("again");
        put(&directory.join(FILE), &encode(&content()).expect("JSON")).expect("written");
        let (store, next, remembered) = Store::open(Some(&directory));
        assert_eq!((next, store.waiting.len(), store.damaged), (9, 1, None));
        let key = content().rules[0].key.key();
        assert_eq!(remembered[&key], Remembered { id: ServiceId(4), uuid: "u".into() });
        fs::remove_dir_all(directory).expect("ours");
    }

    #[test]
    fn a_file_cut_or_changed_anywhere_is_moved_aside_and_not_used() {
        let directory = scratch("damaged");
        let path = directory.join(FILE);
        let whole = encode(&content()).expect("JSON");
        let cuts = (0..whole.len()).map(|end| whole[..end].to_vec());
        let flips = (0..whole.len()).map(|at| {
            let mut bytes = whole.clone();
            bytes[at] ^= 1;
            bytes
        });
        for bytes in cuts.chain(flips) {
            fs::write(&path, &bytes).expect("writable");
            let (store, next, remembered) = Store::open(Some(&directory));
            assert!(store.waiting.is_empty() && next == 0 && remembered.is_empty());
            let aside = store.damaged.expect("it is named");
            assert_eq!(fs::read(&aside).expect("it is kept"), bytes);
            assert!(!path.exists());
            fs::remove_file(aside).expect("ours");
        }
        fs::remove_dir_all(directory).expect("ours");
    }
}
