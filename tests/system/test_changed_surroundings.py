"""A launched run whose directory stops taking files, and whose rows change between two starts: told, and continued."""

from __future__ import annotations

import re
import shutil
import struct
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

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
from tests.rigs.prefork import RUN_FIRST
from tests.rigs.small_runs import assert_every_prompt_trained_once, logs, small
from tests.rigs.two_processes import start_command, with_ports, write_config
from tests.rigs.waiting import wait_until

pytestmark = pytest.mark.slow
STEPS = 8
NO_CAPABILITIES = struct.pack("Ii", 0x20080522, 0)
"""Header of capset(2), version 3, for this process."""


def slow_run(make_config: Callable[..., RunConfig], folder: Path, rows: Path) -> Path:
    """Configuration of a run whose steps take about a tenth of a second."""
    engine = {"engine": "scripted", "engine_args": {"mean_length": 6, "seconds_per_token": 0.01}}
    data = {"train_files": [str(rows)]}
    config = small(make_config, rollout=engine, trainer={"max_steps": STEPS}, data=data)
    return write_config(with_ports(config.model_copy(update={"run_dir": str(folder / "run")}), free_port), folder)


def last_step(run: Path) -> int:
    with closing(Journal(run / JOURNAL_FILE)) as journal:
        return journal.last_step()


def test_a_directory_that_stops_taking_files_ends_a_launched_run_and_changed_answers_are_accepted_by_name(
    make_config: Callable[..., RunConfig], digits_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the capabilities of root, with which every folder is writable. Nothing is lost by either."""
    run, log, rows = tmp_path / "run", tmp_path / "train.log", tmp_path / "rows.parquet"
    shutil.copy(digits_data / "rl.parquet", rows)
    first = tmp_path / "first.py"
    first.write_text(f"import ctypes\nctypes.CDLL(None).capset({NO_CAPABILITIES!r}, bytes(24))\n")
    monkeypatch.setenv(RUN_FIRST, str(first))
    train = start_command("train", str(slow_run(make_config, tmp_path, rows)), log=log)
    wait_until(lambda: int(read_status(run).get("step") or 0) >= 2, "step 2", tmp_path)
    run.chmod(0o555)
    try:
        code = train.wait(timeout=60)
    finally:
        run.chmod(0o755)
    said = log.read_text()
    assert code == ExitCode.BAD_STATE, said
    assert re.search(f"the run directory {run} cannot be written any more.*Make it writable and continue with", said)
    assert "Traceback" not in said

    stopped_at = last_step(run)
    table = pq.read_table(rows)
    answers = ["8", *table.column("answer").to_pylist()[1:]]
    pq.write_table(table.set_column(table.schema.get_field_index("answer"), "answer", [answers]), rows)
    resume = ("train", str(run / "config.yaml"), "--resume")
    assert start_command(*resume, log=log).wait(timeout=60) == ExitCode.USER_ERROR, log.read_text()
    assert re.search(rf"{ANSWERS} was \w+, is \w+.* Undo it, or add --accept-changes", log.read_text()), log.read_text()
    assert last_step(run) == stopped_at, "nothing was trained"

    assert start_command(*resume, "--accept-changes", log=log).wait(timeout=120) == 0, log.read_text()
    assert f"steps after {stopped_at} are of other inputs: {ANSWERS} was" in logs(run / "logs", whole=True)
    with closing(Journal(run / JOURNAL_FILE)) as journal:
        before, after = recorded_updates(journal, "inputs")
    assert (before.after_step, after.after_step) == (0, stopped_at)
    assert {name for name in before.settings if before.settings[name] != after.settings[name]} == {ANSWERS}
    assert_every_prompt_trained_once(run, STEPS)
