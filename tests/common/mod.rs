//! What every whole-process test needs: a gateway process, a blocking HTTP client, a ZMQ publisher, waiting with a
//! deadline. Everything is on loopback and ends with the test.
#![allow(dead_code)] // each test binary uses a part of it

pub mod asking;
pub mod client;
pub mod engines;
pub mod fleet;
pub mod gateway;
pub mod pd;
pub mod schema;
pub mod seccomp;

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Longest wait for something that must happen; never the measure of a test, only the end of a failed one.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// A process that ends with the test, however that ends.
pub struct Child(pub std::process::Child);

impl Drop for Child {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Polls until `probe` yields a value.
///
/// # Panics
/// With `what` when it has not within [`PATIENCE`].
pub fn wait_for<T>(what: &str, mut probe: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(value) = probe() {
            return value;
        }
        assert!(Instant::now() < deadline, "waited {PATIENCE:?} in vain: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A TCP port of 127.0.0.1 that was free a moment ago, and that no connection is given.
pub fn free_port() -> u16 {
    free_ports(1)
}

/// The first of so many TCP ports of 127.0.0.1 in a row that were free a moment ago. They are below those that the kernel
/// hands out, so that neither a connection nor another test's [`free_port`] gets in between.
pub fn free_ports(count: u16) -> u16 {
    use std::sync::atomic::{AtomicU16, Ordering};
    static NEXT: AtomicU16 = AtomicU16::new(0);
    wait_for("ports in a row are free", || {
        // Test binaries that run at the same time begin elsewhere.
        let first = std::process::id() as u16 % 128 * 64 + NEXT.fetch_add(count, Ordering::Relaxed);
        let first = 20_000 + first % 12_000;
        (first..first + count).all(|port| TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok()).then_some(first)
    })
}

/// An address of 127.0.0.1 that was free a moment ago.
pub fn free_address() -> SocketAddr {
    (Ipv4Addr::LOCALHOST, free_port()).into()
}

/// The directory with recordings, vectors and traces that may not be copied into the repository.
pub fn shared_dir() -> PathBuf {
    std::env::var_os("KVLANE_SHARED")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../shared"), PathBuf::from)
}

/// The directory with real tokenizers, filled by `.ci/tokenizers`.
pub fn tokenizers_dir() -> PathBuf {
    std::env::var_os("KVLANE_TOKENIZERS")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("target/tokenizers"), PathBuf::from)
}

/// The path, or none with a line that names the skipped test; in CI an absent path fails.
pub fn required(test: &str, path: PathBuf) -> Option<PathBuf> {
    if path.exists() {
        return Some(path);
    }
    assert!(std::env::var_os("CI").is_none(), "{test}: {} is absent, and CI must have it", path.display());
    eprintln!("skipped: {test}: {} is absent", path.display());
    None
}

/// A directory of this test, removed when dropped.
pub struct Scratch(PathBuf);

impl Scratch {
    /// A fresh directory.
    pub fn new(name: &str) -> Self {
        use std::sync::atomic::{AtomicU32, Ordering};
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("kvlane-{name}-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&path).expect("the temporary directory is writable");
        Scratch(path)
    }

    /// Its path.
    pub fn path(&self) -> &std::path::Path {
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
