//! Helper processes: this program started again with another command, dying with its parent.
//!
//! The child's standard input is a pipe that only the parent holds. When the parent ends, however it ends, the pipe
//! closes and the child exits; so no run leaves processes behind.

use std::io::{self, Read};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

/// How often a child's readiness is looked at.
const POLL_EVERY: Duration = Duration::from_millis(20);

/// Ends this process when its parent does. Called first by commands that run as children.
pub fn end_with_parent() {
    std::thread::spawn(|| {
        // Nothing is ever written: the read returns when the other end is closed.
        let _ = io::stdin().read(&mut [0]);
        std::process::exit(1);
    });
}

/// Runs the gateway's command line in this process, as a child of the demo or of a benchmark.
pub fn gateway(arguments: Vec<String>) -> ExitCode {
    end_with_parent();
    kvlane::cli::main_from(std::iter::once("kvlane".to_owned()).chain(arguments).map(Into::into))
}

/// A running helper process; dropping it kills it and waits for its end.
#[derive(Debug)]
pub struct Child {
    name: String,
    process: std::process::Child,
}

impl Child {
    /// Starts this program again with these arguments; what it prints goes to the log file.
    ///
    /// # Errors
    /// The log cannot be written or the process not be started.
    pub fn start(name: &str, arguments: &[String], log: &Path) -> io::Result<Self> {
        let log = std::fs::File::create(log)?;
        let process = Command::new(std::env::current_exe()?)
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()?;
        Ok(Child { name: name.to_owned(), process })
    }

    /// Its process id.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.process.id()
    }

    /// Waits until `ready` holds.
    ///
    /// # Errors
    /// The process ended, or the time is over.
    pub fn wait_until(&mut self, what: &str, limit: Duration, ready: impl Fn() -> bool) -> io::Result<()> {
        let start = Instant::now();
        while !ready() {
            if let Some(status) = self.process.try_wait()? {
                return Err(io::Error::other(format!("{} ended ({status}) before {what}", self.name)));
            }
            if start.elapsed() > limit {
                return Err(io::Error::other(format!("{} did not reach: {what} (waited {limit:?})", self.name)));
            }
            std::thread::sleep(POLL_EVERY);
        }
        Ok(())
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // Both fail only when the process is gone already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// That many different free loopback ports. Another process may take one before it is used; the user of it then
/// reports that it cannot bind.
///
/// # Errors
/// The system has no free port.
pub fn free_ports(count: usize) -> io::Result<Vec<u16>> {
    let listeners: io::Result<Vec<_>> = (0..count).map(|_| TcpListener::bind((Ipv4Addr::LOCALHOST, 0))).collect();
    listeners?.iter().map(|listener| Ok(listener.local_addr()?.port())).collect()
}

/// A blocking GET, for looking at helpers; the status and the body.
///
/// # Errors
/// Anything but a whole answer within 2 s.
pub fn http_get(address: SocketAddr, path: &str) -> io::Result<(u16, String)> {
    use std::io::Write;
    let limit = Duration::from_secs(2);
    let mut stream = std::net::TcpStream::connect_timeout(&address, limit)?;
    stream.set_read_timeout(Some(limit))?;
    stream.set_write_timeout(Some(limit))?;
    write!(stream, "GET {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n")?;
    let mut bytes = Vec::new();
    stream.take(16 * 1024 * 1024).read_to_end(&mut bytes)?;
    crate::client::parse_whole(&bytes).ok_or_else(|| io::Error::other("not a whole HTTP answer"))
}
