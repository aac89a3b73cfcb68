"""What a trial has shown: read from the files that every run writes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from asyncrl.config.schema import RunConfig
from asyncrl.telemetry.recorder import METRICS_FILE, SAMPLES_FILE, read_status
from asyncrl.tools.doctor.findings import Finding, size

Record = dict[str, Any]


def find_in_run(config: RunConfig) -> Iterator[Finding]:
    steps, status = _read(config.run_path / METRICS_FILE), read_status(config.run_path)
    servers: list[Record] = status.get("servers", [])
    yield _parity(config, steps, servers)
    yield _push(steps, servers)
    if config.trainer.mode == "sync":
        yield _turns(steps)
    yield _completions(steps, _read(config.run_path / SAMPLES_FILE))
    residual = sum(step["ledger_residual"] for step in steps)
    errors = status.get("errors", {})
    if residual or errors:
        value = f"ledger residual {residual:g}, errors {errors}"
        yield Finding("account", value, "problem", "the logs of learner and rollout server name each error")


def _parity(config: RunConfig, steps: list[Record], servers: list[Record]) -> Finding:
    """A server over the limit is refused, and the trial has failed."""
    limit = config.max_logprob_difference
    found = [server["parity"]["largest"] for server in servers if server.get("parity")]
    if found:
        value = f"engine and learner differ by at most {max(found):.2g} nats a token; {limit:g} is accepted"
        return Finding("log-prob parity", value)
    largest = max(step.get("logprob_diff_max") or 0.0 for step in steps)
    if not config.alignment.rows:
        value = f"is not checked (alignment.rows=0); in the trial's steps they differ by up to {largest:.2g} nats"
        return Finding("log-prob parity", value, "warning", "set alignment.rows=2: it costs a second at the start")
    value = f"no server was left at the end to tell it; in the trial's steps: up to {largest:.2g} nats"
    return Finding("log-prob parity", value, "note")


def _push(steps: list[Record], servers: list[Record]) -> Finding:
    last = steps[-1]
    value = f"{size(last['publish_bytes'])} written in {last['publish_s']:.3f} s"
    arrivals = [server["weights"] for server in servers if server.get("weights")]
    if arrivals:
        slowest = max(arrivals, key=lambda arrival: arrival["transfer_s"] + arrival["load_s"])
        value += f", over {slowest['channel']} in {slowest['transfer_s']:.3f} s"
        value += f", into the engine in {slowest['load_s']:.3f} s"
    return Finding("weight push", value)


def _turns(steps: list[Record]) -> Finding:
    last = steps[-1]
    value = (
        f"the learner falls asleep in {last['sleep_s/learner']:.2f} s ({size(last['sleep_bytes/learner'])} leave the "
        f"device), wakes in {last['wake_s/learner']:.2f} s, and computes the same as before"
    )
    return Finding("sleep and wake", value)


def _completions(steps: list[Record], samples: list[Record]) -> Finding:
    counts = {name: sum(step.get(f"rows/{name}", 0) for step in steps) for name in ("finished", "truncated")}
    failed = sum(step.get(f"rows/{name}", 0) for step in steps for name in ("error", "timed_out"))
    rate = max(step.get("tokens_per_s/rollout") or 0.0 for step in steps)
    counted = ", ".join(f"{count:g} {name}" for name, count in counts.items())
    value = f"{counted}, {failed:g} failed; mean reward {steps[-1].get('reward/mean') or 0:.3g}"
    value += f"; {rate:,.0f} tokens/s" if rate else ""
    if not failed:
        return Finding("completions", value)
    texts = [c["error"] for sample in samples for c in sample["completions"] if c["error"]]
    said = f": {texts[0]}" if texts else ""
    return Finding("completions", value + said, "problem", "mend the reward: what it fails on is not trained on")


def _read(file: Path) -> list[Record]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
