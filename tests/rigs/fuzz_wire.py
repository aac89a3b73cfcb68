"""Fuzz both ends of the wire: `python -m tests.rigs.fuzz_wire --messages 100000 --seed 1`.

A real learner's network thread and a good server work while another process sends mutated messages to both of the
learner's endpoints; then a real server's link listens to a hostile learner. Prints counts as JSON. Exit code 1 names
the problems: a crash, a hang, a damaged account, memory that grows, or a good server that was harmed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from protocol.curve import make_keys
from tests.rigs.fuzz.rig import LearnerRig, memory_mib, small_config
from tests.rigs.fuzz.server_side import fuzz_server_side
from tests.rigs.tiny import ROOT

RSS_SLACK_MIB = 48.0
"""Allocator noise; a leak of 1 kB per message would show as 100 MiB."""
WARM_UP_TAKEN = 200
SLOW_S = 5.0
"""Longest that a good server may wait for an answer."""


@dataclass
class LearnerSideResult:
    sent: Counter[str] = field(default_factory=Counter)
    """Hostile messages by kind."""
    answers: Counter[str] = field(default_factory=Counter)
    """The learner's answers to hostile peers, by kind."""
    slowest_probe_s: float = 0.0
    good: dict[str, Any] = field(default_factory=dict)
    """Report of the good server."""
    errors: dict[str, int] = field(default_factory=dict)
    dropped: int = 0
    taken: int = 0
    rss_mib: list[float] = field(default_factory=list)
    """Resident memory at the start, after the first fifth, and at the end."""
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)


def fuzz_learner_side(messages: int, seed: int, folder: Path, *, curve: bool = False) -> LearnerSideResult:
    keys = [str(folder / "keys")] if curve else []
    if curve:
        make_keys(folder / "keys")
    rig = LearnerRig(small_config(keys_dir="".join(keys)), folder)
    rig.start()
    endpoints = [rig.config.control_endpoint, rig.config.weights_endpoint]
    result = LearnerSideResult(rss_mib=[memory_mib()])
    started = time.monotonic()
    good = start("good_server", *endpoints, *keys)
    hostile = None
    try:
        _take_more(rig, WARM_UP_TAKEN)
        for part, share in enumerate((messages // 5, messages - messages // 5)):
            hostile = start("hostile", *endpoints, str(share), str(seed + part), *keys)
            while hostile.poll() is None:
                rig.turn()
            result.rss_mib.append(memory_mib())
            report = _report(hostile, "hostile", result)
            result.sent.update(report.get("sent", {}))
            result.answers.update(report.get("answers", {}))
            result.slowest_probe_s = max(result.slowest_probe_s, report.get("slowest_probe_s", 0.0))
        _take_more(rig, WARM_UP_TAKEN)  # all tickets go on, and nothing is broken
        result.rss_mib[-1] = memory_mib()
        result.problems += rig.problems()
    finally:
        rig.close()
        if hostile is not None and hostile.poll() is None:
            hostile.kill()
    result.problems += rig.journal_problems()
    result.good = _report(good, "the good server", result)
    result.seconds = time.monotonic() - started
    result.errors, result.taken = dict(rig.network.servers.errors), len(rig.taken)
    result.dropped = rig.network.control.dropped + rig.network.weights.dropped
    grown = result.rss_mib[-1] - result.rss_mib[1]
    if grown > RSS_SLACK_MIB:
        result.problems.append(f"resident memory grew by {grown:.0f} MiB after the first fifth")
    if result.good.get("errors"):
        result.problems.append(f"the good server heard {result.good['errors'][:3]}")
    for kind in ("ack", "chunk", "pulse"):
        slowest = result.good.get(kind, {}).get("max_ms", float("inf"))
        if slowest > 1000 * SLOW_S:
            result.problems.append(f"the good server waited {slowest:.0f} ms for an answer ({kind})")
    return result


def _take_more(rig: LearnerRig, groups: int) -> None:
    enough = len(rig.taken) + groups
    while len(rig.taken) < enough:
        rig.turn()


def start(module: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", f"tests.rigs.fuzz.{module}", *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _report(process: subprocess.Popen[str], name: str, result: LearnerSideResult) -> dict[str, Any]:
    try:
        out, err = process.communicate(timeout=20)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
    if process.returncode != 0 or not out.strip():
        result.problems.append(f"{name} ended with {process.returncode}: {err.strip()[-500:]}")
        return {}
    return json.loads(out.strip().splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=100_000, help="to each side")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--curve", action="store_true", help="with keys: hostile peers hold one that is authorised")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.CRITICAL)  # refusals would be most of the output
    with tempfile.TemporaryDirectory() as folder:
        learner_side = fuzz_learner_side(arguments.messages, arguments.seed, Path(folder), curve=arguments.curve)
    server_side = asyncio.run(fuzz_server_side(arguments.messages, arguments.seed))
    print(json.dumps({"learner's side": asdict(learner_side), "server's side": asdict(server_side)}, indent=2))
    problems = learner_side.problems + server_side.problems
    print("Problems: " + ("none" if not problems else "\n- ".join(["", *problems])))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
