"""A launched run whose rows change between two starts, or whose directory stops taking files: told, and continued."""

from __future__ import annotations

import re
import shutil
import signal
import struct
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from asyncrl.config.schema import RunConfig
from asyncrl.errors import ExitCode
from asyncrl.journal import JOURNAL_FILE
from asyncrl.journal.run_inputs import recorded_updates
from asyncrl.journal.writer import Journal
from asyncrl.launch.ports import free_port
from asyncrl.telemetry.recorder import read_status
from learner.tickets.ticket_writer import ANSWERS
from tests.rigs.prefork import RUN_FIRST, Service
from tests.rigs.small_runs import assert_every_prompt_trained_once, logs, small
from tests.rigs.two_processes import start_command, with_ports, write_config
from tests.rigs.waiting import wait_until

pytestmark = pytest.mark.slow
STEPS = 10
NO_CAPABILITIES = struct.pack("Ii", 0x20080522, 0)
"""Header of capset(2), version 3, for this process."""


def slow_run(make_config: Callable[..., RunConfig], folder: Path, **sections: Any) -> Path:
    """Configuration of a run whose steps take about a tenth of a second."""
    engine = {"engine": "scripted", "engine_args": {"mean_length": 6, "seconds_per_token": 0.01}}
    config = small(make_config, rollout=engine, trainer={"max_steps": STEPS}, **sections)
    return write_config(with_ports(config.model_copy(update={"run_dir": str(folder / "run")}), free_port), folder)


def until_step(train: Service, run: Path, step: int, log: Path) -> None:
    wait_until(lambda: int(read_status(run).get("step") or 0) >= step, f"step {step}", log.parent)
    assert train.poll() is None, log.read_text()


def test_changed_answers_are_refused_by_the_launched_run_and_accepted_by_name(
    make_config: Callable[..., RunConfig], digits_data: Path, tmp_path: Path
) -> None:
    run, log, rows = tmp_path / "run", tmp_path / "train.log", tmp_path / "rows.parquet"
    shutil.copy(digits_data / "rl.parquet", rows)
    file = slow_run(make_config, tmp_path, data={"train_files": [str(rows)]})
    train = start_command("train", str(file), log=log)
    until_step(train, run, 2, log)
    train.send_signal(signal.SIGTERM)
    assert train.wait(timeout=60) == ExitCode.INTERRUPTED, log.read_text()
    stopped_at = int(read_status(run)["step"])

    table = pq.read_table(rows).to_pydict()
    changed = pq.read_table(rows).from_pydict(table | {"answer": ["8", *table["answer"][1:]]})
    pq.write_table(changed, rows)
    resume = ("train", str(run / "config.yaml"), "--resume")
    assert start_command(*resume, log=log).wait(timeout=60) == ExitCode.USER_ERROR, log.read_text()
    assert re.search(rf"{ANSWERS} was \w+, is \w+.* Undo it, or add --accept-changes", log.read_text()), log.read_text()
    assert int(read_status(run)["step"]) == stopped_at, "nothing was trained"

    assert start_command(*resume, "--accept-changes", log=log).wait(timeout=120) == 0, log.read_text()
    assert f"steps after {stopped_at} are of other inputs: {ANSWERS} was" in logs(run / "logs", whole=True)
    with closing(Journal(run / JOURNAL_FILE)) as journal:
        first, second = recorded_updates(journal, "inputs")
    assert (first.after_step, second.after_step) == (0, stopped_at)
    assert {name for name in first.settings if first.settings[name] != second.settings[name]} == {ANSWERS}
    assert_every_prompt_trained_once(run, STEPS)


def test_a_directory_that_stops_taking_files_ends_the_launched_run_and_loses_nothing(
    make_config: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the capabilities of root, with which every folder is writable."""
    run, log = tmp_path / "run", tmp_path / "train.log"
    file = slow_run(make_config, tmp_path)
    first = tmp_path / "first.py"
    first.write_text(f"import ctypes\nctypes.CDLL(None).capset({NO_CAPABILITIES!r}, bytes(24))\n")
    monkeypatch.setenv(RUN_FIRST, str(first))
    train = start_command("train", str(file), log=log)
    until_step(train, run, 2, log)
    run.chmod(0o555)
    try:
        code = train.wait(timeout=60)
    finally:
        run.chmod(0o755)
    assert code == ExitCode.BAD_STATE, log.read_text()
    assert f"the run directory {run} cannot be written any more" in log.read_text()
    assert "Make it writable and continue with --resume" in log.read_text()
    assert "Traceback" not in log.read_text()
    assert start_command("train", str(file), "--resume", log=log).wait(timeout=120) == 0, log.read_text()
    assert_every_prompt_trained_once(run, STEPS)
