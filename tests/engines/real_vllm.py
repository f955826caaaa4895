#!/usr/bin/env python3
"""Two real vLLM engines behind kvlane: is the verdict right, and do the engines confirm what kvlane predicts?

usage: real_vllm.py --engines DIR --serve FILE --kvlane FILE [--venv NAME] [CASE ...]

--engines  a directory with engines and tiny models (KVLANE_ENGINES), --serve the script that starts one of them
(KVLANE_ENGINES_SERVE), --kvlane the gateway's binary (KVLANE_BIN). --list names the cases; without a name all are run.
Each case starts two engines (40 to 80 s on two cores; cases with equal engines share them) and a gateway with one rule,
and sends unique first turns, then repeats and grown turns, one at a time. Of each request it is known

* which endpoint it went to and how many prompt tokens were predicted to hit there: the gateway's own counters,
* how many did: `usage.prompt_tokens_details.cached_tokens` of the answer.

A prediction is confirmed where both are equal. Exit status 1: a verdict is another than expected, fewer than 95 % of the
repeats went to the engine that holds them, fewer than 95 % of the hits were confirmed, a request failed, or the engines'
own prefix cache counters differ from what the answers said. This is no part of the default test run.
"""

import argparse
import dataclasses
import json
import os
import sys
import time
from pathlib import Path

# Nothing is written beside the sources.
sys.dont_write_bytecode = True
import harness  # noqa: E402
import workload  # noqa: E402

ENOUGH = 0.95
SHOWN_MAX = 8


@dataclasses.dataclass(frozen=True)
class Options:
    """How an engine is started; `seed` None = PYTHONHASHSEED unset."""

    algorithm: str
    seed: str | None = None
    block_tokens: int = 16
    blocks: int = 512
    int_keys: bool = True
    # Serve LoRA adapters beside the model.
    adapters: bool = False
    # All have one tokenizer. The other has groups of layers with caches of their own: sliding window and full attention.
    model: str = "tiny-qwen3"


@dataclasses.dataclass(frozen=True)
class Case:
    """What is run, and what must come out, per endpoint."""

    name: str
    engines: tuple[Options, Options]
    rule: dict
    verdicts: tuple[str, str]
    faults: tuple[list, list] = ([], [])
    hints: tuple[list, list] = ([], [])
    # Stop and start engine 1 while requests go on.
    restart: bool = False
    # Another gateway takes over, and learns from the engines' replay sockets what they hold.
    late: bool = False


def rule(algorithm=None, seed=None, block_tokens=16):
    made = {"kvBlockSize": block_tokens}
    if algorithm:
        made["kvHashAlgo"] = algorithm
    if seed is not None:
        made["kvNoneHashSeed"] = seed
    return made


def both(value):
    return (value, value)


def cases(fixed_seed):
    """All cases. `fixed_seed`: the engine is of a release that hashes a fixed seed where PYTHONHASHSEED is unset."""
    cbor, xx, plain = "sha256_cbor", "xxhash_cbor", "sha256"
    seeded, unseeded = both(Options(cbor, "0")), both(Options(cbor))
    xx_seeded, xx_random = both(Options(xx, "7")), both(Options(xx))
    plain_seeded, plain_unseeded = both(Options(plain, "0")), both(Options(plain))
    adapters = both(Options(cbor, "0", adapters=True))
    exact, derived = both("exact"), both("derived")
    unset = exact if fixed_seed else derived
    no_seed_fault = both([]) if fixed_seed else both(["seed"])
    adopted = both(["algorithm"])
    unset_adopted = adopted if fixed_seed else both([])
    return [
        Case("sha256_cbor, seed", seeded, rule(cbor, "0"), exact),
        Case("fault: wrong seed stated", seeded, rule(cbor, "1"), derived, both(["seed"])),
        Case("fault: block size 32 stated", seeded, rule(cbor, "0", 32), derived, both(["block_size"])),
        Case("fault: block size 128 stated", seeded, rule(cbor, "0", 128), derived, both(["block_size"])),
        Case("fault: xxhash_cbor stated", seeded, rule(xx, "0"), derived, both(["algorithm"])),
        Case("restart of the gateway", seeded, rule(cbor, "0"), exact, late=True),
        Case("restart of one engine", seeded, rule(cbor, "0"), exact, restart=True),
        Case("sha256_cbor, no seed", unseeded, rule(cbor), unset, no_seed_fault),
        Case("xxhash_cbor, seed", xx_seeded, rule(xx, "7"), exact),
        Case("xxhash_cbor, no seed", xx_random, rule(xx), derived, both(["seed"])),
        Case("restart, random seed", xx_random, rule(xx), derived, both(["seed"]), restart=True),
        Case("default sha256, seed", plain_seeded, rule(None, "0"), exact, hints=adopted),
        Case("fault: sha256_cbor stated", plain_seeded, rule(cbor, "0"), derived, both(["algorithm"])),
        Case("default sha256, no seed", plain_unseeded, rule(), unset, no_seed_fault, unset_adopted),
        Case(
            "one engine with another seed",
            (Options(cbor, "0"), Options(cbor, "5")),
            rule(cbor, "0"),
            ("exact", "derived"),
            ([], ["seed"]),
        ),
        Case("adapters", adapters, rule(cbor, "0"), exact),
        Case("adapters, wrong seed stated", adapters, rule(cbor, "1"), derived, both(["seed"])),
        Case("hybrid model", both(Options(cbor, "0", model="tiny-gemma3")), rule(cbor, "0"), exact),
        Case("bytes as keys, small caches", both(Options(cbor, "0", blocks=150, int_keys=False)), rule(cbor, "0"), exact),
    ]


@dataclasses.dataclass
class Record:
    """One request and what became of it."""

    name: str
    step: str
    endpoint: int
    holder: int | None
    predicted: int
    prompt: int
    cached: int
    # Sent elsewhere on purpose: an overloaded holder, or an endpoint that shall become warm.
    diverted: bool

    def claims_hit(self):
        return self.predicted > 0 or self.cached > 0


class Run:
    """One case under way."""

    def __init__(self, case, engines, gateway):
        self.case = case
        self.engines = engines
        self.gateway = gateway
        self.records = []
        self.errors = []

    def send(self, conversation, step):
        """Sends what the conversation says now; the answer's text."""
        before, diverted_before = self.gateway.decisions()
        body = conversation.body()
        try:
            status, answer = harness.call(self.gateway.port, "POST", conversation.path, body)
        except OSError as error:
            status, answer = 0, str(error).encode()
        if status != 200:
            self.errors.append(f"{conversation.name}, {step}: {status} {answer[:200]}")
            return None
        after, diverted = self.gateway.decisions()
        changed = [ep for ep in after if after[ep][0] != before[ep][0]]
        # A request that was sent again counts at both; the one that answered is the last, and alone has an inventory.
        endpoint = changed[-1] if len(changed) == 1 else max(changed, key=lambda ep: after[ep][1] - before[ep][1])
        predicted = after[endpoint][1] - before[endpoint][1]
        said, prompt, cached = workload.read_answer(answer, body.get("stream", False))
        record = Record(
            conversation.name, step, endpoint, conversation.holder, predicted, prompt, cached, diverted != diverted_before
        )
        conversation.holder = endpoint
        self.records.append(record)
        return said

    def rounds(self, conversations, grown=2):
        said = {}
        for conversation in conversations:
            said[conversation.name] = self.send(conversation, "first")
        for conversation in conversations:
            self.send(conversation, "repeat")
        for turn in range(grown):
            for conversation in conversations:
                conversation.grow(said[conversation.name])
                said[conversation.name] = self.send(conversation, f"grown {turn + 1}")
        for conversation in conversations:
            self.send(conversation, "repeat of grown")

    def restart(self, conversations):
        """Engine 1 ends and comes again while conversations go on."""
        engine = self.engines[1]
        engine.stop()
        engine.start()
        number = 0
        while engine.is_starting():
            self.send(conversations[number % len(conversations)], "one engine is down")
            number += 1
        engine.wait()
        self.gateway.wait_ready(len(self.engines))
        for conversation in conversations:
            self.send(conversation, "both engines are up")
        self.rounds(workload.conversations(self.case.name + " after the restart", self.case.engines[0].adapters), grown=1)


def check_verdicts(case, gateway):
    """What the gateway says of each endpoint; what is wrong about it."""
    expected = list(zip(case.verdicts, case.faults, case.hints))
    found = []

    def settled():
        report = gateway.parity()
        found[:] = [(e["verdict"], e["faults"], e["hints"], e) for _, e in sorted(report.items())]
        return all(one[:3] == want for one, want in zip(found, expected))

    try:
        harness.wait_for("verdicts", settled, 10)
    except TimeoutError:
        pass
    problems = []
    for ep, (one, want) in enumerate(zip(found, expected)):
        if one[:3] != want:
            problems.append(f"endpoint {ep}: (verdict, faults, hints) is {one[:3]}, expected {want}: {one[3]['detail']}")
        if one[3]["by_use"]["alarm"]:
            problems.append(f"endpoint {ep}: an alarm by use: {one[3]['by_use']}")
        if not one[3]["complete"]:
            problems.append(f"endpoint {ep}: {one[3]['orphans']} blocks whose beginning was never announced")
    return " / ".join(show_verdict(*one[:3]) for one in found), problems


def show_verdict(verdict, faults, hints):
    notes = [f"fault {name}" for name in faults] + [f"hint {name}" for name in hints]
    return verdict + (f" ({', '.join(notes)})" if notes else "")


def check_counters(run, before, problems):
    """The engines' own counters must say what the answers said; not of an engine that was restarted."""
    for ep, engine in enumerate(run.engines):
        if run.case.restart and ep == 1:
            continue
        served = [record for record in run.records if record.endpoint == ep]
        queries, hits = (now - then for now, then in zip(engine.counters(), before[ep]))
        answers = sum(record.prompt for record in served), sum(record.cached for record in served)
        if (queries, hits) != answers:
            problems.append(f"endpoint {ep}: its counters say {queries:.0f} tokens and {hits:.0f} hits, answers {answers}")


def judge(run, problems):
    """Shares of repeats at their holder, and of hits confirmed: a row of the table."""
    repeats = [r for r in run.records if r.holder is not None and not r.diverted and r.step != "one engine is down"]
    at_holder = [r for r in repeats if r.endpoint == r.holder]
    hits = [r for r in run.records if r.claims_hit()]
    wrong = [r for r in hits if r.predicted != r.cached]
    to_holder = len(at_holder) / max(1, len(repeats))
    confirmed = 1 - len(wrong) / max(1, len(hits))
    problems += run.errors[:SHOWN_MAX]
    if to_holder < ENOUGH:
        problems.append(f"only {to_holder:.1%} of the repeats went to the engine that holds them")
    if confirmed < ENOUGH:
        problems.append(f"only {confirmed:.1%} of the hits are as predicted")
    if len(hits) < len(run.records) / 2:
        problems.append(f"only {len(hits)} of {len(run.records)} requests hit: the load does not show what it should")
    return {
        "requests": len(run.records),
        "errors": len(run.errors),
        "hits": len(hits),
        "to_holder": to_holder,
        "confirmed": confirmed,
        "fewer": sum(r.cached < r.predicted for r in wrong),
        "more": sum(r.cached > r.predicted for r in wrong),
        "cached": sum(r.cached for r in run.records) / max(1, sum(r.prompt for r in run.records)),
        "diverted": sum(r.diverted for r in run.records),
        "wrong": [dataclasses.asdict(r) for r in wrong + [r for r in repeats if r.endpoint != r.holder]],
    }


def start_gateway(case, engines, arguments):
    tokenizer_files = Path(arguments.engines) / "models" / "tiny-qwen3"
    gateway = harness.Gateway(arguments.kvlane, engines, case.rule, tokenizer_files)
    try:
        gateway.wait_ready(len(engines))
    except Exception:
        print(gateway.log(), file=sys.stderr)
        gateway.stop()
        raise
    return gateway


def run_case(case, engines, arguments):
    problems = []
    before = [engine.counters() for engine in engines]
    gateway = start_gateway(case, engines, arguments)
    try:
        run = Run(case, engines, gateway)
        conversations = workload.conversations(case.name, case.engines[0].adapters)
        run.rounds(conversations)
        if case.late:
            gateway.stop()
            run.gateway = gateway = start_gateway(case, engines, arguments)
            for conversation in conversations:
                run.send(conversation, "repeat through another gateway")
        if case.restart:
            run.restart(conversations)
        verdict, wrong = check_verdicts(case, gateway)
        problems += wrong
        check_counters(run, before, problems)
        row = judge(run, problems)
        if arguments.logs or problems:
            print(gateway.log(), file=sys.stderr)
    finally:
        gateway.stop()
    return {"case": case.name, "verdict": verdict, "problems": problems, **row}


def report(row):
    shares = f"{row['to_holder']:9.1%} {row['confirmed']:9.1%} {row['fewer']:5} {row['more']:5} {row['cached']:8.1%}"
    mark = "ok" if not row["problems"] else "FAILED"
    print(f"{row['case']:30} {row['requests']:8} {row['hits']:5} {shares} {mark:7} {row['verdict']}", flush=True)
    for problem in row["problems"]:
        print(f"    {problem}", flush=True)
    for wrong in row["wrong"][:SHOWN_MAX]:
        print(f"    not as predicted: {wrong}", flush=True)


def read_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    path = lambda name, variable, text: parser.add_argument(
        name, default=os.environ.get(variable), required=variable not in os.environ, help=f"{text} [{variable}]"
    )
    path("--engines", "KVLANE_ENGINES", "directory of the engines")
    path("--serve", "KVLANE_ENGINES_SERVE", "script that starts an engine")
    path("--kvlane", "KVLANE_BIN", "the gateway's binary")
    parser.add_argument("--venv", default="vllm", help="engine version: a directory below --engines")
    parser.add_argument("--http-port", type=int, default=18000)
    parser.add_argument("--events-port", type=int, default=15500)
    parser.add_argument("--json", help="also write every row to this file")
    parser.add_argument("--logs", action="store_true", help="print the gateway's log of each case")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("case", nargs="*", help="(part of) the name of a case")
    return parser.parse_args()


def version_of(arguments):
    """(major, minor) of the engine, from its package's own metadata."""
    metadata = Path(arguments.engines, arguments.venv).glob("lib/python3*/site-packages/vllm*.dist-info")
    names = sorted(path.name.removesuffix(".dist-info") for path in metadata)
    if not names:
        sys.exit(f"no vllm package in {arguments.engines}/{arguments.venv}")
    return tuple(int(part) for part in names[0].split("-")[1].split(".")[:2])


class Place:
    """Where engines come from, and the ports that they get."""

    def __init__(self, arguments):
        self.engines, self.serve, self.venv = arguments.engines, arguments.serve, arguments.venv
        self.http_port, self.events_port = arguments.http_port, arguments.events_port


def main():
    arguments = read_arguments()
    version = version_of(arguments)
    wanted = [case for case in cases(version >= (0, 29)) if is_wanted(case.name, arguments.case)]
    if arguments.list or not wanted:
        print("\n".join(case.name for case in cases(True)))
        return 0 if arguments.list else 2
    print(f"vLLM {version[0]}.{version[1]}, {arguments.venv}; {time.strftime('%F %T')}")
    print(f"{'case':30} {'requests':>8} {'hits':>5} {'to holder':>9} {'confirmed':>9} {'fewer':>5} {'more':>5} {'cached':>8}")
    engines, rows = [], []
    try:
        for case in wanted:
            if [engine.options for engine in engines] != list(case.engines):
                stop(engines)
                engines = [harness.Engine(Place(arguments), k, options) for k, options in enumerate(case.engines)]
                for engine in engines:
                    engine.start()
                for engine in engines:
                    engine.wait()
            row = run_case(case, engines, arguments)
            rows.append(row)
            report(row)
    finally:
        stop(engines)
        if arguments.json:
            Path(arguments.json).write_text(json.dumps(rows, indent=1))
    return 1 if any(row["problems"] for row in rows) else 0


def is_wanted(name, patterns):
    return not patterns or any(pattern in name for pattern in patterns)


def stop(engines):
    for engine in engines:
        engine.stop()


if __name__ == "__main__":
    sys.exit(main())
