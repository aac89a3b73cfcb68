"""A trial: `asyncrl train` of the configuration, as small as can be, in a folder of its own, with a deadline."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from asyncrl.config.load import dump_config
from asyncrl.config.schema import RunConfig, changed
from asyncrl.devices.device import max_logprob_difference
from asyncrl.errors import ExitCode
from asyncrl.run_folder.failure import read_failure
from asyncrl.telemetry.jsonl import read_lines
from asyncrl.telemetry.recorder import METRICS_FILE, SAMPLES_FILE, read_status
from asyncrl_plugins.doctor.disk import nearest_folder
from asyncrl_plugins.doctor.findings import Finding, Findings, split_fix
from asyncrl_plugins.doctor.network import is_local

STEPS = 2
"""The second one learns from completions that published weights have sampled."""
GROUP_SIZE = 2
RESPONSE_TOKENS = 32
ROWS, HELD_OUT_ROWS = 256, 4
BEYOND_START_S = 300.0
"""Time for the steps, the checkpoint and the export; the start has network.start_timeout_s."""
STOP_S = 30.0
LOG = "trial.log"


def find_by_trial(config: RunConfig) -> Findings[None]:
    """Run the trial in a folder on the disk of run_dir; keep the folder if it fails."""
    deadline_s = config.start_timeout_s + BEYOND_START_S
    yield Finding("trial", f"a real run of {STEPS} tiny steps begins, and has {deadline_s:g} s", "note")
    folder = Path(tempfile.mkdtemp(prefix="asyncrl-trial-", dir=nearest_folder(config.run_path)))
    with ExitStack() as cleanup:
        cleanup.callback(shutil.rmtree, folder)
        trial = smallest(config, folder / "run")
        began = time.monotonic()
        code = _run(trial, folder, deadline_s)
        if code == 0:
            steps = f"{STEPS} steps of {trial.batch.prompts_per_step} x {trial.batch.group_size} completions"
            value = f"{steps}, a checkpoint and an export in {time.monotonic() - began:.0f} s"
            findings = [Finding("trial", value), *find_in_run(trial)]
        else:
            findings = [_failed(trial, folder, code, deadline_s)]
        if any(finding.verdict == "problem" for finding in findings):
            cleanup.pop_all()
            kept = f"is kept: {folder}, with {LOG} and run{os.sep}logs"
            findings.append(Finding("trial's folder", kept, "note"))
        yield from findings


def smallest(config: RunConfig, run_dir: Path) -> RunConfig:
    """Shrink a configuration's sizes, keeping how things are computed."""
    changes: dict[str, object] = {
        "run_dir": str(run_dir),
        "batch.prompts_per_step": config.algorithm.updates_per_batch,
        "batch.group_size": min(config.batch.group_size, GROUP_SIZE),
        "data.max_train_rows": min(config.data.max_train_rows or ROWS, ROWS),
        "data.max_val_rows": min(config.data.max_val_rows or HELD_OUT_ROWS, HELD_OUT_ROWS),
        "evaluation.every_steps": 0,
        "evaluation.before_training": False,
        "evaluation.group_size": 1,
        "trainer.max_steps": STEPS,
        "trainer.save_freq": 0,
        "trainer.stop_grace_s": 5.0,
        "trainer.samples_per_step": config.algorithm.updates_per_batch,
        "launch.max_restarts": 0,
        "telemetry.linger_s": 0.0,
        **dict.fromkeys(("network.control_port", "network.weights_port"), 0),
        **dict.fromkeys(("telemetry.learner_port", "telemetry.rollout_port"), 0),
    }
    if not config.environment.is_used:  # a conversation cut this short would not be one
        changes["data.max_response_length"] = min(config.data.max_response_length, RESPONSE_TOKENS)
    if not is_local(config.network.host):
        changes |= {"network.host": "127.0.0.1", "network.keys_dir": ""}
    return changed(config, changes)


def _run(config: RunConfig, folder: Path, deadline_s: float) -> int | None:
    """Run the trial; return its exit code, None on timeout. The launcher stops its services when it is stopped."""
    file = folder / "config.yaml"
    file.write_text(dump_config(config), encoding="utf-8")
    command = [sys.executable, "-m", "asyncrl", "train", str(file)]
    with (folder / LOG).open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
    try:
        return process.wait(deadline_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _failed(config: RunConfig, folder: Path, code: int | None, deadline_s: float) -> Finding:
    """Report why it failed: the run's own error, or its log's line on a service that died, or the last line."""
    lines = (folder / LOG).read_text(errors="replace", encoding="utf-8").splitlines() or ["nothing"]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    deaths = [line for line in lines if "ended with code" in line or "was killed by" in line]
    saved = read_failure(config.run_path)
    last = errors or ([saved.reason] if saved else deaths) or lines
    head, *more = last[-1].splitlines()
    value, fix = split_fix(head)
    if code == ExitCode.CRASHED:
        fix = ""  # that of a run that could go on
    elif code is None:
        value, fix = f"not done after {deadline_s:g} s; last output: {lines[-1]}", ""
    return Finding("trial", value, "problem", fix, (*more, *lines[-10:]))


# --- findings in the files that every run writes ------------------------------------------------------

Record = dict[str, Any]


def find_in_run(config: RunConfig) -> Iterator[Finding]:
    steps, status = _read(config.run_path / METRICS_FILE), read_status(config.run_path)
    servers: list[Record] = status.get("servers", [])
    yield _parity(config, steps, servers)
    yield _completions(steps, _read(config.run_path / SAMPLES_FILE))
    residual, errors = sum(step["ledger_residual"] for step in steps), status.get("errors", {})
    if residual or errors:
        value = f"ledger residual {residual:g}, errors {errors}"
        yield Finding("account", value, "problem", "the logs of learner and rollout server name each error")


def _parity(config: RunConfig, steps: list[Record], servers: list[Record]) -> Finding:
    """Report the measured log-prob differences; one over the limit has failed the trial already."""
    measured = [server["parity"]["largest"] for server in servers if server.get("parity")]
    if measured:
        accepted = (
            f"{max_logprob_difference(config.model, config.learner, config.rollout, config.alignment):g} is accepted"
        )
        value = f"engine and learner differ by at most {max(measured):.2g} nats a token; {accepted}"
        return Finding("log-prob parity", value)
    largest = max(step.get("logprob_diff_max") or 0.0 for step in steps)
    value = f"was not checked before training; in the trial's steps they differ by up to {largest:.2g} nats"
    return Finding("log-prob parity", value, "warning", "set alignment.rows=2: it costs a second at the start")


def _completions(steps: list[Record], samples: list[Record]) -> Finding:
    finished, truncated, *others = (
        sum(step.get(f"rows/{name}", 0) for step in steps) for name in ("finished", "truncated", "error", "timed_out")
    )
    rate = max(step.get("tokens_per_s/rollout") or 0.0 for step in steps)
    value = f"{finished:g} finished, {truncated:g} truncated, {sum(others):g} failed"
    value += f"; mean reward {steps[-1].get('reward/mean') or 0:.3g}" + (f"; {rate:,.0f} tokens/s" if rate else "")
    if not sum(others):
        return Finding("completions", value)
    errors = (completion["error"] for sample in samples for completion in sample["completions"])
    value += next((f": {error}" for error in errors if error), "")
    lost = sum(count for step in steps for key, count in step.items() if key.startswith("env/errors/"))
    names = [name for name, count in (("environment", lost), ("reward", sum(others) - lost)) if count > 0]
    fix = f"fix the {' and the '.join(names)}: what fails is not trained on"
    return Finding("completions", value, "problem", fix)


def _read(file: Path) -> list[Record]:
    return read_lines(file) if file.exists() else []
