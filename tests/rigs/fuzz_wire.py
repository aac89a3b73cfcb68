"""Fuzz both ends of the wire: `python -m tests.rigs.fuzz_wire --messages 100000 --seed 1`.

A real network thread of a learner and a good server work while another process sends mutated messages to both of the
learner's endpoints; then a real server-side link listens to a hostile learner. Prints a table; exit code 1 names what
went wrong: a crash, a hang, a damaged account, memory that grows, or a good server that was harmed.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from protocol.curve import make_keys
from tests.rigs.fuzz.rig import LearnerRig, small_config
from tests.rigs.fuzz.server_side import ServerSideResult, fuzz_server_side

ROOT = Path(__file__).parents[2]
RSS_SLACK_MIB = 48.0
"""Allocator noise; a leak of 1 kB per message would show as 100 MiB."""
WARM_UP_TAKEN = 200
SLOW_S = 5.0
"""A good server's answers must not take longer, whatever the others do."""


@dataclass
class LearnerSideResult:
    hostile: dict[str, Any] = field(default_factory=dict)
    good: dict[str, Any] = field(default_factory=dict)
    errors: dict[str, int] = field(default_factory=dict)
    dropped: int = 0
    taken: int = 0
    rss_mib: list[float] = field(default_factory=list)
    """At the start, when warm, and at the end."""
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)


def fuzz_learner_side(messages: int, seed: int, folder: Path, *, curve: bool = False) -> LearnerSideResult:
    keys = str(folder / "keys") if curve else ""
    if curve:
        make_keys(Path(keys))
    rig = LearnerRig(small_config(keys_dir=keys), folder)
    rig.start()
    endpoints = [rig.config.control_endpoint, rig.config.weights_endpoint]
    tail = [keys] if curve else []
    result = LearnerSideResult(rss_mib=[rig.rss_mib()])
    started = time.monotonic()
    good = _start("good_server", *endpoints, *tail)
    hostile = None
    try:
        while len(rig.taken) < WARM_UP_TAKEN:
            rig.turn()
        first = _start("hostile", *endpoints, str(messages // 5), str(seed), *tail)
        _work_until_done(rig, first)
        result.rss_mib.append(rig.rss_mib())
        hostile = _start("hostile", *endpoints, str(messages - messages // 5), str(seed + 1), *tail)
        _work_until_done(rig, hostile)
        before = len(rig.taken)
        while len(rig.taken) < before + WARM_UP_TAKEN:  # all tickets go on, and nothing is broken
            rig.turn()
        result.rss_mib.append(rig.rss_mib())
        result.problems += rig.problems()
        result.hostile = _merge([_report(first, "hostile", result), _report(hostile, "hostile", result)])
    finally:
        rig.close()
        for process in filter(None, (good, hostile)):
            if process.poll() is None and process is hostile:
                process.kill()
    result.problems += rig.journal_problems()
    result.good = _report(good, "the good server", result)
    result.seconds = time.monotonic() - started
    result.errors, result.taken = dict(rig.network.servers.errors), len(rig.taken)
    result.dropped = rig.network.control.dropped + rig.network.weights.dropped
    _judge(result)
    return result


def _judge(result: LearnerSideResult) -> None:
    grown = result.rss_mib[-1] - result.rss_mib[1]
    if grown > RSS_SLACK_MIB:
        result.problems.append(f"resident memory grew by {grown:.0f} MiB after the first fifth")
    if result.good.get("errors"):
        result.problems.append(f"the good server heard {result.good['errors'][:3]}")
    for what in ("ack", "chunk", "pulse"):
        slowest = result.good.get(what, {}).get("max_ms", float("inf"))
        if slowest > 1000 * SLOW_S:
            result.problems.append(f"the good server waited {slowest:.0f} ms for an answer ({what})")


def _start(module: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", f"tests.rigs.fuzz.{module}", *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _work_until_done(rig: LearnerRig, process: subprocess.Popen[str]) -> None:
    while process.poll() is None:
        rig.turn()


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


def _merge(reports: list[dict[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {"sent": {}, "answers": {}, "seconds": 0.0, "slowest_probe_s": 0.0}
    for report in reports:
        for table in ("sent", "answers"):
            for key, count in report.get(table, {}).items():
                merged[table][key] = merged[table].get(key, 0) + count
        merged["stalled"] = merged.get("stalled", 0) + report.get("stalled", 0)
        merged["seconds"] += report.get("seconds", 0.0)
        merged["slowest_probe_s"] = max(merged["slowest_probe_s"], report.get("slowest_probe_s", 0.0))
    return merged


def print_learner_side(result: LearnerSideResult) -> None:
    print("Learner's side (control and weights)\n")
    print("| hostile messages sent | count |\n|---|---:|")
    for what, count in sorted(result.hostile.get("sent", {}).items()):
        print(f"| {what} | {count:,} |")
    print(f"| **all** | **{sum(result.hostile.get('sent', {}).values()):,}** |")
    print(f"| of these dropped undecoded (muted peers) | {result.dropped:,} |")
    print(f"| peers that never read | {result.hostile.get('stalled', 0):,} |\n")
    print("| what hostile peers were answered | count |\n|---|---:|")
    for what, count in sorted(result.hostile.get("answers", {}).items()):
        print(f"| `{what}` | {count:,} |")
    print("\n| the good server meanwhile | count | median ms | p99 ms | max ms |\n|---|---:|---:|---:|---:|")
    names = {"ack": "group sent to acknowledged", "chunk": "chunk asked to received", "pulse": "between two messages"}
    for key, name in names.items():
        row = result.good.get(key, {})
        values = " | ".join(f"{row.get(v, float('nan')):.1f}" for v in ("median_ms", "p99_ms", "max_ms"))
        print(f"| {name} | {row.get('count', 0):,} | {values} |")
    start, warm, end = [*result.rss_mib, float("nan"), float("nan")][:3]
    rate = sum(result.hostile.get("sent", {}).values()) / max(result.hostile.get("seconds", 0.0), 1e-9)
    print(f"\nGroups trained {result.taken:,}, all right, none twice; slowest probe ", end="")
    print(
        f"{result.hostile.get('slowest_probe_s', float('nan')):.2f} s; {result.seconds:.0f} s, {rate:,.0f} messages/s."
    )
    print(
        f"Resident memory of the learner: {start:.0f} MiB at start, {warm:.0f} MiB after a fifth, {end:.0f} MiB at the "
        f"end."
    )
    top = sorted(result.errors.items(), key=lambda item: -item[1])[:12]
    print(f"Counted by the learner: {dict(top)}\n")


def print_server_side(result: ServerSideResult) -> None:
    print("Server's side (link, weight transfer, manifests)\n")
    print("| hostile learner | count |\n|---|---:|")
    for what, count in sorted(result.counts.items()):
        print(f"| {what} | {count:,} |")
    print(f"\n{result.seconds:.0f} s; resident memory {result.rss_mib[0]:.0f} -> {result.rss_mib[1]:.0f} MiB.\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=100_000, help="to each side")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--curve", action="store_true", help="with keys: hostile peers hold one that is authorised")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.CRITICAL)  # a refusal each would be most of the output
    with tempfile.TemporaryDirectory() as folder:
        learner_side = fuzz_learner_side(arguments.messages, arguments.seed, Path(folder), curve=arguments.curve)
    print_learner_side(learner_side)
    print("\n".join(learner_side.problems))
    server_side = asyncio.run(fuzz_server_side(arguments.messages, arguments.seed))
    print_server_side(server_side)
    problems = learner_side.problems + server_side.problems
    print("Problems: " + ("none" if not problems else "\n- ".join(["", *problems])))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
