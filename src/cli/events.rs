//! `kvlane events`: what engines publish, decoded by the gateway's own reader, a JSON object a line.
//!
//! `--file` takes what `shared/engines/record.py` writes (`{"steps": [{"frames": [{"frames": [HEX, …]}]}]}`), a JSON array of
//! such messages (`[[TOPIC, SEQUENCE, PAYLOAD], …]`, each in hex), the answer of `POST /kv_cache_events` (with `--engine
//! trtllm`), or one raw payload.

use std::io::{self, Read as _, Write as _};
use std::net::{SocketAddr, ToSocketAddrs as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use serde_json::{Value, json};
use shards::service::Engine;

use super::Outcome;
use crate::ingest::inspect::{self, Heard, Tap, TapFrom};

/// Largest file that is read, bytes. A larger one is refused.
const FILE_BYTES_MAX: u64 = 1 << 30;
/// Pause between two drains.
const DRAIN_PAUSE: Duration = Duration::from_millis(20);
/// Longest wait between two looks at whether the time is over.
const SLICE: Duration = Duration::from_millis(200);

/// What `kvlane events` is told on its command line.
#[derive(Debug, Args)]
pub(super) struct EventsArgs {
    /// Publisher: tcp://HOST:PORT. TensorRT-LLM's drain: http://HOST:PORT, with --engine trtllm.
    #[arg(long, value_name = "ADDRESS", required_unless_present = "file", conflicts_with = "file")]
    connect: Option<String>,
    /// Recorded messages, a payload, or the answer of a drain.
    #[arg(long, value_name = "FRAMES")]
    file: Option<PathBuf>,
    /// Wait at the address for publishers that connect, instead of connecting to it.
    #[arg(long, requires = "connect")]
    bind: bool,
    /// Ask this replay socket first: tcp://HOST:PORT.
    #[arg(long, value_name = "ADDRESS", requires = "connect")]
    replay: Option<String>,
    /// First sequence number that the replay is asked for.
    #[arg(long, value_name = "SEQ", default_value_t = 0, requires = "replay")]
    from: u64,
    /// Only messages whose topic begins so.
    #[arg(long, value_name = "TEXT", default_value = "")]
    topic: String,
    /// End after so many messages.
    #[arg(long, value_name = "N")]
    count: Option<u64>,
    /// End after so many seconds; if nothing came, the exit code is 1.
    #[arg(long, value_name = "SECONDS")]
    wait: Option<u64>,
    /// Whose events they are.
    #[arg(long, value_enum, default_value = "vllm")]
    engine: EngineName,
    /// Drain a TensorRT-LLM engine, whose events are then gone for everybody else.
    #[arg(long)]
    i_own_this_drain: bool,
}

/// Engines that publish events.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum EngineName {
    /// vLLM.
    Vllm,
    /// SGLang.
    Sglang,
    /// TensorRT-LLM.
    Trtllm,
}

impl EngineName {
    fn engine(self) -> Engine {
        match self {
            EngineName::Vllm => Engine::Vllm,
            EngineName::Sglang => Engine::Sglang,
            EngineName::Trtllm => Engine::Trtllm,
        }
    }
}

/// Why it ended badly.
enum Failure {
    /// The command was wrong.
    Usage(String),
    /// Something did not work.
    No(String),
    /// Whoever reads has left: it has what it wanted.
    ReaderLeft,
}

pub(super) fn events(args: &EventsArgs) -> Outcome {
    let result = match (&args.file, &args.connect) {
        (Some(file), _) => from_file(args, file),
        (None, Some(address)) if address.starts_with("http://") => from_drain(args, address),
        (None, Some(address)) => from_stream(args, address),
        (None, None) => Err(Failure::Usage("--connect ADDRESS or --file FRAMES is needed".to_owned())),
    };
    match result {
        Ok(()) | Err(Failure::ReaderLeft) => Outcome::Right,
        Err(Failure::Usage(message)) => {
            eprintln!("kvlane events: {message}");
            Outcome::Usage
        }
        Err(Failure::No(message)) => {
            eprintln!("kvlane events: {message}");
            Outcome::No
        }
    }
}

/// Prints messages until there were enough, or the time is over.
struct Printer {
    printed: u64,
    count: Option<u64>,
    until: Option<Instant>,
}

impl Printer {
    fn new(args: &EventsArgs) -> Self {
        let until = args.wait.and_then(|seconds| Instant::now().checked_add(Duration::from_secs(seconds)));
        Printer { printed: 0, count: args.count, until }
    }

    fn print(&mut self, value: &Value) -> Result<(), Failure> {
        let mut out = io::stdout().lock();
        match writeln!(out, "{value}").and_then(|()| out.flush()) {
            Ok(()) => {
                self.printed += 1;
                Ok(())
            }
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Err(Failure::ReaderLeft),
            Err(error) => Err(Failure::No(format!("standard output: {error}"))),
        }
    }

    fn is_done(&self) -> bool {
        self.count.is_some_and(|count| self.printed >= count) || self.until.is_some_and(|until| Instant::now() >= until)
    }

    fn end(&self) -> Result<(), Failure> {
        match self.printed {
            0 if self.count != Some(0) => Err(Failure::No("no message came".to_owned())),
            _ => Ok(()),
        }
    }
}

fn from_stream(args: &EventsArgs, address: &str) -> Result<(), Failure> {
    let replay = args.replay.as_deref().map(|address| (address, args.from));
    let from = TapFrom { engine: args.engine.engine(), address, bind: args.bind, topic: &args.topic, replay };
    let mut tap = Tap::open(&from).map_err(|error| Failure::Usage(error.to_string()))?;
    let mut printer = Printer::new(args);
    while !printer.is_done() {
        match tap.next(SLICE) {
            None => {}
            Some(Heard::Live(message)) => printer.print(&message)?,
            Some(Heard::Replayed(mut message)) => {
                message["replayed"] = json!(true);
                printer.print(&message)?;
            }
            Some(Heard::ReplayEnded) => eprintln!("kvlane events: the replay is over"),
            Some(Heard::Connected) => eprintln!("kvlane events: {address}: a publisher is connected"),
            Some(Heard::Lost) => eprintln!("kvlane events: {address}: the publisher is gone"),
        }
    }
    printer.end()
}

fn from_drain(args: &EventsArgs, url: &str) -> Result<(), Failure> {
    if args.engine != EngineName::Trtllm {
        return Err(Failure::Usage(format!("{url}: only TensorRT-LLM is drained over HTTP: --engine trtllm")));
    }
    if !args.i_own_this_drain {
        let why = "POST /kv_cache_events gives each event once, to whoever asks: a gateway that drains this engine would \
                   lose what is printed here, and take this command for a second drainer. Give --i-own-this-drain where \
                   nobody else drains it, or ask the gateway: GET /netlox/v1/config/ai/kv/parity";
        return Err(Failure::Usage(format!("{url}: refused: {why}")));
    }
    let address = http_address(url).map_err(Failure::Usage)?;
    let mut printer = Printer::new(args);
    while !printer.is_done() {
        for event in inspect::drain_once(address).map_err(Failure::No)? {
            printer.print(&event)?;
        }
        std::thread::sleep(DRAIN_PAUSE);
    }
    printer.end()
}

fn http_address(url: &str) -> Result<SocketAddr, String> {
    let host = url.trim_start_matches("http://").trim_end_matches('/');
    let mut found = host.to_socket_addrs().map_err(|error| format!("{url}: {error}; expected http://HOST:PORT"))?;
    found.next().ok_or_else(|| format!("{url}: the name has no address"))
}

fn from_file(args: &EventsArgs, path: &Path) -> Result<(), Failure> {
    let unreadable = |error: io::Error| Failure::Usage(format!("{}: {error}", path.display()));
    let mut bytes = Vec::new();
    let file = std::fs::File::open(path).map_err(unreadable)?;
    file.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes).map_err(unreadable)?;
    if bytes.len() as u64 > FILE_BYTES_MAX {
        return Err(Failure::Usage(format!("{}: more than {FILE_BYTES_MAX} bytes", path.display())));
    }
    let mut printer = Printer::new(args);
    for line in decode(args.engine.engine(), &args.topic, &bytes) {
        if printer.count.is_some_and(|count| printer.printed >= count) {
            break;
        }
        printer.print(&line)?;
    }
    printer.end()
}

/// The lines of a file's content, whichever of the formats it has.
fn decode(engine: Engine, topic: &str, bytes: &[u8]) -> Vec<Value> {
    match serde_json::from_slice::<Value>(bytes) {
        Ok(Value::Object(recording)) if recording.contains_key("steps") => recorded(engine, topic, &recording["steps"]),
        Ok(Value::Array(messages)) if messages.iter().all(Value::is_array) && !messages.is_empty() => {
            messages.iter().filter_map(|message| frames(engine, topic, message)).collect()
        }
        Ok(Value::Array(_)) if engine == Engine::Trtllm => inspect::drained(bytes),
        _ => vec![Value::Object(inspect::payload(engine, bytes))],
    }
}

fn recorded(engine: Engine, topic: &str, steps: &Value) -> Vec<Value> {
    let mut lines = Vec::new();
    for step in steps.as_array().into_iter().flatten() {
        for message in step["frames"].as_array().into_iter().flatten() {
            let Some(mut line) = frames(engine, topic, &message["frames"]) else { continue };
            line["step"] = step["name"].clone();
            lines.push(line);
        }
    }
    lines
}

/// A message whose frames are hex; none where its topic is another.
fn frames(engine: Engine, topic: &str, message: &Value) -> Option<Value> {
    let decoded = message.as_array().map(|frames| frames.iter().map(unhex).collect::<Option<Vec<_>>>());
    let Some(Some(decoded)) = decoded else { return Some(json!({"rejected": "frames", "frames": message})) };
    let frames: Vec<&[u8]> = decoded.iter().map(Vec::as_slice).collect();
    // A replayed message begins with an empty frame more.
    let replayed = frames.len() > 3;
    let named = frames.get(usize::from(replayed)).copied().unwrap_or_default();
    named.starts_with(topic.as_bytes()).then(|| inspect::message(engine, &frames, replayed))
}

fn unhex(frame: &Value) -> Option<Vec<u8>> {
    let text = frame.as_str()?;
    let digits = |at: usize| u8::from_str_radix(text.get(at..at + 2)?, 16).ok();
    text.len().is_multiple_of(2).then(|| (0..text.len()).step_by(2).map(digits).collect())?
}
