//! The proxies under comparison: how each is configured and started, pinned, on loopback.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use loadgen::child::{free_ports, http_get};
use loadgen::engine::{EngineHandle, EngineOptions};

use super::cpu;

/// Time for a proxy to answer.
const START_MAX: Duration = Duration::from_secs(30);

/// What the proxies stand between.
pub struct Place<'a> {
    /// For configurations and logs.
    pub directory: &'a Path,
    /// The backend's addresses.
    pub backends: &'a [SocketAddr],
    /// Core of the proxy.
    pub proxy_core: usize,
    /// Core of the load, the backend, and kvlane's threads beside its shard.
    pub load_core: usize,
    /// Directory of tokenizers.
    pub tokenizers: &'a Path,
}

/// A running proxy; dropping it ends it.
pub struct Proxy {
    pub name: &'static str,
    pub address: SocketAddr,
    process: Child,
}

impl Proxy {
    pub fn id(&self) -> u32 {
        self.process.id()
    }

    /// Lets it run, or not.
    pub fn run(&self, run: bool) {
        cpu::signal(self.id(), if run { libc::SIGCONT } else { libc::SIGSTOP });
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        cpu::signal(self.id(), libc::SIGKILL);
        let _ = self.process.wait();
    }
}

/// A program in the search path.
fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let directories = std::env::split_paths(&path).chain(["/usr/sbin", "/usr/local/sbin"].map(PathBuf::from));
    directories.map(|directory| directory.join(program)).find(|file| file.is_file())
}

/// nginx with one worker; none when it is not installed.
pub fn nginx(place: &Place<'_>) -> anyhow::Result<Option<Proxy>> {
    let Some(program) = find("nginx") else { return Ok(None) };
    let port = free_ports(1)?[0];
    let servers: String = place.backends.iter().map(|address| format!("    server {address};\n")).collect();
    let root = place.directory.display();
    let configuration = format!(
        "daemon off;\nmaster_process off;\nworker_processes 1;\npid {root}/nginx.pid;\nerror_log {root}/nginx.log;\n\
         events {{ worker_connections 4096; }}\n\
         http {{\n  access_log off;\n  client_max_body_size 64m;\n  client_body_buffer_size 1m;\n  \
         client_body_temp_path {root}/body;\n  proxy_temp_path {root}/proxy;\n  fastcgi_temp_path {root}/fastcgi;\n  \
         uwsgi_temp_path {root}/uwsgi;\n  scgi_temp_path {root}/scgi;\n  keepalive_requests 1000000000;\n  \
         upstream engines {{\n{servers}    keepalive 256;\n    keepalive_requests 1000000000;\n  }}\n  \
         server {{\n    listen 127.0.0.1:{port} backlog=4096;\n    location / {{\n      proxy_pass http://engines;\n      \
         proxy_http_version 1.1;\n      proxy_set_header Connection \"\";\n      proxy_buffering off;\n    }}\n  }}\n}}\n"
    );
    let file = place.directory.join("nginx.conf");
    std::fs::write(&file, configuration)?;
    let mut command = Command::new(program);
    command.arg("-c").arg(file).arg("-e").arg(place.directory.join("nginx.log"));
    start("nginx", command, Some(place.proxy_core), port, place).map(Some)
}

/// HAProxy with one thread; none when it is not installed.
pub fn haproxy(place: &Place<'_>) -> anyhow::Result<Option<Proxy>> {
    let Some(program) = find("haproxy") else { return Ok(None) };
    let port = free_ports(1)?[0];
    let server = |(number, address): (usize, &SocketAddr)| format!("  server s{number} {address}\n");
    let servers: String = place.backends.iter().enumerate().map(server).collect();
    let configuration = format!(
        "global\n  nbthread 1\n  maxconn 8192\ndefaults\n  mode http\n  timeout connect 5s\n  timeout client 60s\n  \
         timeout server 60s\n  option http-keep-alive\n  http-reuse always\nfrontend f\n  bind 127.0.0.1:{port}\n  \
         default_backend b\nbackend b\n  balance roundrobin\n{servers}"
    );
    let file = place.directory.join("haproxy.cfg");
    std::fs::write(&file, configuration)?;
    let mut command = Command::new(program);
    command.arg("-db").arg("-f").arg(file);
    start("HAProxy", command, Some(place.proxy_core), port, place).map(Some)
}

/// Starts a program that dies with this one, on a core if one is given, and waits until it answers at the port.
fn start(
    name: &'static str,
    mut command: Command,
    core: Option<usize>,
    port: u16,
    place: &Place<'_>,
) -> anyhow::Result<Proxy> {
    let file = place.directory.join(format!("{}.out", name.replace(' ', "-")));
    let log = std::fs::File::create(&file)?;
    // A gateway started as a helper ends when its standard input does, so it gets a pipe.
    command.stdin(Stdio::piped()).stdout(log.try_clone()?).stderr(log);
    // SAFETY: the closure runs between fork and exec and makes two system calls; it allocates nothing and takes no lock.
    unsafe {
        command.pre_exec(move || {
            if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) != 0 {
                return Err(io::Error::last_os_error());
            }
            core.map_or(Ok(()), cpu::pin)
        });
    }
    let process = command.spawn().with_context(|| format!("{name} cannot be started"))?;
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let mut proxy = Proxy { name, address, process };
    let begun = Instant::now();
    while !answers(address) {
        let ended = proxy.process.try_wait()?.is_some();
        if ended || begun.elapsed() > START_MAX {
            bail!("{name} does not answer; it said:\n{}", std::fs::read_to_string(&file).unwrap_or_default());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(proxy)
}

fn answers(address: SocketAddr) -> bool {
    http_get(address, "/v1/models").is_ok_and(|(status, _)| status == 200)
}

/// kvlane: plain round robin, or KV-exact with the caches of `engines` announced as the backends' own.
pub fn kvlane(place: &Place<'_>, engines: Option<&[EngineHandle]>) -> anyhow::Result<(Proxy, SocketAddr)> {
    let name = if engines.is_some() { "kvlane KV-exact" } else { "kvlane plain" };
    let ports = free_ports(2)?;
    let [address, admin] = [ports[0], ports[1]].map(|port| SocketAddr::from((Ipv4Addr::LOCALHOST, port)));
    let mut text = format!(
        "log = \"warn\"\n[shards]\ncores = [{}]\n[ingest]\ncores = [{}]\n[control]\ncore = {}\n\
         [tokenizers]\ndir = {}\n[admin]\nlisten = \"{admin}\"\n\
         [[rule]]\nexternalIP = \"127.0.0.1\"\nport = {}\nprotocol = \"tcp\"\nsel = 0\nmode = 4\nkvExactMode = {}\n",
        place.proxy_core,
        place.load_core,
        place.load_core,
        serde_json::Value::from(place.tokenizers.display().to_string()),
        address.port(),
        if engines.is_some() { 3 } else { 0 },
    );
    if engines.is_some() {
        let EngineOptions { block_size, seed, .. } = EngineOptions::default();
        text += &format!("kvBlockSize = {block_size}\nkvHashAlgo = \"sha256_cbor\"\nkvNoneHashSeed = \"{seed}\"\n");
    }
    for (number, backend) in place.backends.iter().enumerate() {
        let (ip, port) = (backend.ip(), backend.port());
        text += &format!("[[rule.endpoints]]\nendpointIP = \"{ip}\"\ntargetPort = {port}\n");
        if let Some(engine) = engines.and_then(|engines| engines.get(number)) {
            let ports = engine.event_addr.zip(engine.replay_addr).context("the engines publish and replay")?;
            text += &format!("kvZmqPort = {}\nkvReplayPort = {}\n", ports.0.port(), ports.1.port());
        }
    }
    let file = place.directory.join(format!("{}.toml", name.replace(' ', "-")));
    std::fs::write(&file, text)?;
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["gateway", "serve", "-c"]).arg(file);
    // kvlane pins its own threads, by its configuration.
    Ok((start(name, command, None, address.port(), place)?, admin))
}
