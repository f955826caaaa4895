"""Processes and HTTP of the checks in this directory: real engines through serve.sh, and the gateway. Loopback only."""

import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

HOST = "127.0.0.1"
MODEL = "Qwen/Qwen3-0.6B"
ADAPTERS = ("alpha", "beta")
# An engine that has not come up by then will not.
ENGINE_START_S = 300
READY_S = 60
REQUEST_S = 120


def wait_for(what, condition, seconds=READY_S):
    """Asks again and again; the value that the condition gave at last."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {seconds} s: {what}")
        time.sleep(0.05)


def call(port, method, path, body=None):
    """One request on a connection of its own: status and body."""
    connection = http.client.HTTPConnection(HOST, port, timeout=REQUEST_S)
    try:
        data = None if body is None else json.dumps(body).encode()
        connection.request(method, path, data, {"Content-Type": "application/json"} if data else {})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def try_call(port, method, path, body=None):
    """The body of a 200, or None where there was none."""
    try:
        status, text = call(port, method, path, body)
    except OSError:
        return None
    return text if status == 200 else None


def samples(text, name):
    """Samples of one metric: [(labels, value)]."""
    found = []
    for line in text.splitlines():
        match = re.fullmatch(r"([\w:]+)(?:\{(.*)\})? (\S+)", line)
        if match and match[1] == name:
            found.append((dict(re.findall(r'(\w+)="([^"]*)"', match[2] or "")), float(match[3])))
    return found


def free_port():
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


class Engine:
    """One real vLLM, as serve.sh starts it."""

    def __init__(self, place, number, options):
        self.place = place
        self.options = options
        self.port = place.http_port + number
        self.events_port = place.events_port + 10 * number
        self.replay_port = self.events_port + 5

    def start(self):
        """Begins to start; `wait` waits for it."""
        if try_call(self.port, "GET", "/health") is not None:
            raise RuntimeError(f"something serves port {self.port} already: stop it, or give another --http-port")
        options = self.options
        command = [self.place.serve, self.place.engines, "-n", "1", "-p", self.port, "-z", self.events_port]
        command += ["-a", options.algorithm, "-s", options.seed or "none", "-b", options.block_tokens]
        command += ["-B", options.blocks, "-i", int(options.int_keys), "-e", self.place.venv, "-m", options.model]
        # An engine whose cache has no room for the longest prompt refuses to start.
        command += ["-l", min(4096, options.block_tokens * (options.blocks - 1)), "-w", ENGINE_START_S]
        if options.adapters:
            named = [f"{name}={self.place.engines}/models/tiny-qwen3-lora-{name}" for name in ADAPTERS]
            command += ["--", "--enable-lora", "--max-lora-rank", 8, "--max-loras", 2, "--lora-modules", *named]
        self.process = subprocess.Popen(
            [str(word) for word in command], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )

    def is_starting(self):
        return self.process.poll() is None

    def wait(self):
        _, errors = self.process.communicate(timeout=2 * ENGINE_START_S)
        if self.process.returncode != 0:
            raise RuntimeError(f"the engine on port {self.port} did not start: {errors.strip()}")

    def stop(self):
        """Ends its whole process group, by the number that serve.sh noted."""
        note = Path(self.place.engines) / "run" / f"{self.port}.pid"
        if not note.exists():
            return
        group = int(note.read_text())
        for sign, seconds in ((signal.SIGTERM, 15), (signal.SIGKILL, 15)):
            try:
                os.killpg(group, sign)
                wait_for("the engine ends", lambda: not group_lives(group), seconds)
                break
            except ProcessLookupError:
                break
            except TimeoutError:
                continue
        note.unlink(missing_ok=True)

    def version(self):
        return json.loads(call(self.port, "GET", "/version")[1])["version"]

    def counters(self):
        """Tokens asked of its prefix cache, and found there, by its own count."""
        text = call(self.port, "GET", "/metrics")[1].decode()
        total = lambda name: sum(value for _, value in samples(text, name))
        return total("vllm:prefix_cache_queries_total"), total("vllm:prefix_cache_hits_total")


def group_lives(group):
    try:
        os.killpg(group, 0)
        return True
    except ProcessLookupError:
        return False


class Gateway:
    """A kvlane process with one rule over the engines."""

    def __init__(self, binary, engines, rule, tokenizer_files):
        self.port, self.admin = free_port(), free_port()
        self.scratch = Path(tempfile.mkdtemp(prefix="kvlane-real-vllm-"))
        model = self.scratch / "tokenizers" / MODEL.replace("/", "__")
        model.mkdir(parents=True)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(Path(tokenizer_files) / name, model / name)
        config = self.scratch / "kvlane.toml"
        config.write_text(self.config(engines, rule))
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("LLB_", "LOXILB_"))}
        with open(self.scratch / "log", "wb") as log:
            self.process = subprocess.Popen(
                [binary, "serve", "-c", config], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
            )

    def config(self, engines, rule):
        lines = [f'[tokenizers]\ndir = "{self.scratch}/tokenizers"\n\n[admin]\nlisten = "{HOST}:{self.admin}"\n']
        lines.append(f'[[rule]]\nname = "real"\nexternalIP = "{HOST}"\nport = {self.port}\nkvExactMode = 3')
        lines.append('kvEngineType = "vllm"')
        lines += [f"{key} = {json.dumps(value)}" for key, value in rule.items()]
        for engine in engines:
            lines.append(f'\n[[rule.endpoints]]\nendpointIP = "{HOST}"\ntargetPort = {engine.port}')
            lines.append(f"kvZmqPort = {engine.events_port}\nkvReplayPort = {engine.replay_port}")
        return "\n".join(lines) + "\n"

    def api(self, path):
        status, text = call(self.admin, "GET", f"/netlox/v1{path}")
        if status != 200:
            raise RuntimeError(f"{path}: {status} {text[:200]}")
        return json.loads(text)

    def wait_ready(self, engines):
        """Until both engines are up, their streams are followed and the tokenizer is there."""

        def ready():
            if self.process.poll() is not None:
                raise RuntimeError(f"kvlane ended with {self.process.returncode}:\n{self.log()}")
            if try_call(self.admin, "GET", "/netlox/v1/version") is None:
                return False
            status = self.api("/status/ready")
            return (
                all(rule["usable_endpoints"] == engines for rule in status["rules"])
                and any(model["state"] == "ready" for model in status["models"])
                and self.streams_followed() == engines
            )

        wait_for("kvlane has its engines, their event streams and the tokenizer", ready)

    def streams_followed(self):
        streams = self.api("/config/ai/kv/streams")["streams"]
        return sum(stream["connected"] and stream["eligible"] for stream in streams)

    def parity(self):
        """The report of each endpoint, by its index."""
        return {entry["ep_idx"]: entry for entry in self.api("/config/ai/kv/parity")["parity"]}

    def decisions(self):
        """Requests sent and prompt tokens predicted to hit, by endpoint; `None` has the requests diverted on purpose."""
        text = call(self.admin, "GET", "/netlox/v1/metrics")[1].decode()
        read = lambda name: {int(labels["ep_idx"]): int(value) for labels, value in samples(text, name)}
        requests, tokens = read("kvlane_endpoint_requests_total"), read("kvlane_endpoint_hit_tokens_total")
        diverted = sum(read("loxilb_pd_kv_tier15_spills_total").values())
        diverted += sum(read("loxilb_pd_kv_tier15_cold_seeds_total").values())
        return {ep: (requests[ep], tokens[ep]) for ep in requests}, diverted

    def log(self):
        return (self.scratch / "log").read_text(errors="replace")

    def stop(self):
        self.process.terminate()
        try:
            self.process.wait(45)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.scratch, ignore_errors=True)
