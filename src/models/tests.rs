use std::fs;
use std::sync::mpsc::{Receiver, channel};

use shards::prompt::Lookup;

use super::*;

/// A word-level tokenizer small enough to stand here.
const TINY: &str = r#"{"version":"1.0","truncation":null,"padding":null,"added_tokens":[],"normalizer":null,
    "pre_tokenizer":{"type":"Whitespace"},"post_processor":null,"decoder":null,
    "model":{"type":"WordLevel","vocab":{"[UNK]":0,"hello":1,"world":2},"unk_token":"[UNK]"}}"#;

/// A loader over a directory of its own; both end with it.
struct Fixture {
    directory: PathBuf,
    control: Arc<Control>,
    tables: Receiver<Arc<ModelTable>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Fixture {
    fn start(name: &str) -> Self {
        let directory = std::env::temp_dir().join(format!("kvlane-models-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&directory);
        fs::create_dir_all(&directory).unwrap();
        let control = Control::new();
        let (sender, tables) = channel();
        let on_change = move |table| drop(sender.send(table));
        let thread = spawn(directory.clone(), Arc::clone(&control), || (), on_change).unwrap();
        Fixture { directory, control, tables, thread: Some(thread) }
    }

    fn write(&self, slug: &str, file: &str, text: &str) {
        fs::create_dir_all(self.directory.join(slug)).unwrap();
        // Moved into place, as one stages a file that is in use.
        let new = self.directory.join(slug).join("new");
        fs::write(&new, text).unwrap();
        fs::rename(new, self.directory.join(slug).join(file)).unwrap();
    }

    fn status(&self, slug: &str) -> Option<ModelStatus> {
        self.control.status().into_iter().find(|s| s.slug == slug)
    }

    /// Waits for the next tables until one is as wanted; 30 s without is a failure.
    fn wait(&self, what: &str, is_so: impl Fn(&ModelTable) -> bool) {
        let deadline = Instant::now() + Duration::from_secs(30);
        while !is_so(&self.control.table()) {
            let left = deadline.checked_duration_since(Instant::now()).unwrap_or_else(|| panic!("waited for: {what}"));
            let _ = self.tables.recv_timeout(left.min(Duration::from_millis(50)));
        }
    }
}

impl Drop for Fixture {
    fn drop(&mut self) {
        self.control.stop();
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
        let _ = fs::remove_dir_all(&self.directory);
    }
}

fn ready(table: &ModelTable, model: &str) -> bool {
    matches!(table.lookup(model), Lookup::Ready(_))
}

fn failed(table: &ModelTable, slug: &str) -> bool {
    matches!(table.get(slug), Some(Entry::Failed { .. }))
}

#[test]
fn a_model_named_by_a_rule_is_loaded_repaired_and_dropped() {
    let fixture = Fixture::start("lifecycle");
    fixture.control.set_wanted(["org/model".to_owned()]);
    fixture.wait("missing", |t| failed(t, "org__model"));
    let status = fixture.status("org__model").unwrap();
    assert_eq!(status.path, fixture.directory.join("org__model/tokenizer.json"));
    assert!(matches!(status.state, ModelState::Failed { reason } if reason.contains("not found")));

    fixture.write("org__model", "tokenizer.json", &TINY[..TINY.len() / 2]);
    fixture.wait("damaged", |_| {
        let state = fixture.status("org__model").map(|s| s.state);
        matches!(state, Some(ModelState::Failed { reason }) if reason.contains("not a usable"))
    });

    fixture.write("org__model", "tokenizer.json", TINY);
    fixture.wait("repaired", |t| ready(t, "org/model"));
    let state = fixture.status("org__model").unwrap().state;
    assert!(matches!(state, ModelState::Ready { template: "missing", template_problem: Some(_), .. }));

    fixture.write("org__model", "chat_template.jinja", "x");
    fixture.wait("template", |_| {
        let state = fixture.status("org__model").map(|s| s.state);
        matches!(state, Some(ModelState::Ready { template: "chat_template.jinja", template_problem: None, .. }))
    });

    fixture.write("org__model", "tokenizer_config.json", "{");
    fixture.wait("damaged configuration", |_| problem(&fixture, "org__model").is_some());
    let told = problem(&fixture, "org__model").unwrap();
    let path = fixture.directory.join("org__model/tokenizer_config.json");
    assert!(told.starts_with(&*path.to_string_lossy()), "{told}");
    assert!(ready(&fixture.control.table(), "org/model"), "the model of before stays in use");

    fs::remove_dir_all(fixture.directory.join("org__model")).unwrap();
    fixture.wait("gone, still named", |_| {
        fixture.status("org__model").is_some_and(|s| s.path.ends_with("tokenizer.json"))
    });
    fixture.control.set_wanted([]);
    fixture.wait("gone", |t| t.get("org__model").is_none());
}

/// What is said of the files of a model that is in use.
fn problem(fixture: &Fixture, slug: &str) -> Option<String> {
    match fixture.status(slug)?.state {
        ModelState::Ready { files_problem, .. } => files_problem,
        _ => None,
    }
}

#[test]
fn a_file_that_is_being_written_takes_no_model_away() {
    let fixture = Fixture::start("half");
    fixture.write("m", "tokenizer.json", TINY);
    fixture.control.set_wanted(["m".to_owned()]);
    fixture.wait("loaded", |t| ready(t, "m"));
    let digest = |fixture: &Fixture| match fixture.status("m").map(|status| status.state) {
        Some(ModelState::Ready { digest, .. }) => digest,
        state => panic!("{state:?}"),
    };
    let before = digest(&fixture);
    let other = TINY.replace("\"world\":2", "\"world\":2,\"again\":3");
    let path = fixture.directory.join("m/tokenizer.json");
    for half in ["", &other[..other.len() / 2]] {
        fs::write(&path, half).unwrap();
        fixture.wait("it is said", |_| problem(&fixture, "m").is_some());
        assert!(ready(&fixture.control.table(), "m"));
        assert_eq!(digest(&fixture), before);
    }
    fs::remove_file(&path).unwrap();
    fixture.wait("that it is gone too", |_| problem(&fixture, "m").is_some_and(|text| text.ends_with("not found")));
    assert!(ready(&fixture.control.table(), "m"));
    fs::write(&path, &other).unwrap();
    fixture.wait("the whole one is taken up", |_| digest(&fixture) != before && problem(&fixture, "m").is_none());
    assert!(ready(&fixture.control.table(), "m"));
}

#[test]
fn a_staged_model_is_loaded_when_a_request_asks() {
    let fixture = Fixture::start("asked");
    fixture.write("a__b", "tokenizer.json", TINY);
    fixture.write("c", "tokenizer.json", TINY);
    fixture.wait("staged", |t| t.entries().count() == 2);
    assert_eq!(fixture.status("c").unwrap().state, ModelState::Staged);
    assert!(matches!(fixture.control.table().lookup("unknown"), Lookup::Missing));
    assert!(matches!(fixture.control.table().lookup("a/b"), Lookup::Loading));
    fixture.wait("loaded", |t| ready(t, "a/b"));
    assert_eq!(fixture.status("c").unwrap().state, ModelState::Staged, "nobody asked for it");
}

#[test]
fn an_assumed_template_is_shown_until_it_is_confirmed() {
    let fixture = Fixture::start("assumed");
    fixture.write("Qwen__X", "tokenizer.json", TINY);
    fixture.control.set_wanted(["Qwen/X".to_owned()]);
    fixture.wait("loaded", |t| ready(t, "Qwen/X"));
    let assumed = || match fixture.status("Qwen__X").map(|s| s.state) {
        Some(ModelState::Ready { template: "assumed_chatml", template_assumed, .. }) => Some(template_assumed),
        _ => None,
    };
    assert_eq!(assumed(), Some(true));
    if let Lookup::Ready(model) = fixture.control.table().lookup("Qwen/X") {
        model.confirm_template();
    }
    assert_eq!(assumed(), Some(false));
}

/// A FIFO that nobody writes to.
fn make_fifo(path: &Path) {
    use std::os::unix::ffi::OsStrExt;
    let path = std::ffi::CString::new(path.as_os_str().as_bytes()).unwrap();
    // SAFETY: the pointer is to a text that ends with a zero byte and outlives the call.
    assert_eq!(unsafe { libc::mkfifo(path.as_ptr(), 0o600) }, 0);
}

#[test]
fn what_is_no_file_of_text_is_reported() {
    let fixture = Fixture::start("odd");
    fs::create_dir_all(fixture.directory.join("fifo")).unwrap();
    make_fifo(&fixture.directory.join("fifo/tokenizer.json"));
    fixture.control.set_wanted(["dir", "binary", "a\0b", "fifo"].map(str::to_owned));
    fs::create_dir_all(fixture.directory.join("dir/tokenizer.json")).unwrap();
    fs::create_dir_all(fixture.directory.join("binary")).unwrap();
    fs::write(fixture.directory.join("binary/tokenizer.json"), [0xff, 0xfe, 0x00]).unwrap();
    fixture.wait("all failed", |t| ["binary", "dir", "a\0b", "fifo"].iter().all(|slug| failed(t, slug)));
    fixture.wait("reasons", |_| {
        let reason = |slug| match fixture.status(slug).map(|s| s.state) {
            Some(ModelState::Failed { reason }) => reason,
            _ => String::new(),
        };
        reason("dir").contains("not a regular file")
            && reason("fifo").contains("not a regular file")
            && reason("binary").contains("UTF-8")
            && reason("a\0b").contains("no directory")
    });
    assert_eq!(fixture.status("fifo").unwrap().path, fixture.directory.join("fifo/tokenizer.json"));
}

#[test]
fn a_directory_that_is_absent_is_waited_for() {
    let fixture = Fixture::start("absent");
    fs::remove_dir(&fixture.directory).unwrap();
    fixture.control.set_wanted(["m".to_owned()]);
    fixture.wait("missing", |t| failed(t, "m"));
    fixture.write("m", "tokenizer.json", TINY);
    fixture.wait("there", |t| ready(t, "m"));
}
