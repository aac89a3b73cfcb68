"""Starts of a service by a machine, and the clock of a learner's waits."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.cli import main as asyncrl
from asyncrl.config.load import dump_config
from asyncrl.config.schema import RunConfig
from asyncrl.errors import BadStateError
from asyncrl.journal import JOURNAL_FILE
from asyncrl.run_folder.contents import next_attempt
from asyncrl.run_folder.failure import FAILURE_FILE, Kind
from asyncrl.telemetry.recorder import RunRecorder
from asyncrl.telemetry.timeline import WaitClock
from tests.rigs.small_runs import save_failure


def _begun(config: RunConfig) -> Path:
    config.run_path.mkdir(parents=True, exist_ok=True)
    (config.run_path / JOURNAL_FILE).touch()
    return config.run_path


def test_it_begins_continues_tries_again_what_another_time_may_mend_and_ends(
    make_config: Callable[..., RunConfig],
) -> None:
    config = make_config()
    assert next_attempt(config.run_path) == "begin"
    run = _begun(config)
    assert next_attempt(config.run_path) == "continue"
    kinds: tuple[Kind, ...] = ("timed_out", "disk_full", "user_error")
    for kind in kinds:
        save_failure(run, kind, reason="waited 5 s for a rollout server")
        assert next_attempt(config.run_path) == "continue"
    save_failure(run, "bad_state")
    with pytest.raises(BadStateError, match=r"the loss is nan.*--resume"):
        next_attempt(config.run_path)
    (run / FAILURE_FILE).unlink()
    RunRecorder(run).status(phase="finished")
    assert next_attempt(config.run_path) == "nothing"


@pytest.mark.parametrize("begun", [True, False])
def test_its_learner_knows_that_nobody_watches_it(
    make_config: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    config, file, became = make_config(), tmp_path / "config.yaml", []
    file.write_text(dump_config(config))
    if begun:
        _begun(config)
    monkeypatch.setattr("asyncrl.launch.one_service.become", lambda *arguments: became.extend(arguments))
    asyncrl(["learn", str(file), "--unattended"])
    assert became == ["learner", "--config", str(file), *(["--resume"] if begun else []), "--unattended"]


# --- waiting -----------------------------------------------------------------------------------------


def test_a_wait_inside_another_counts_for_itself_alone_and_a_wait_that_goes_on_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    clock = WaitClock()
    with clock.waiting("groups"):
        now += 3
        with clock.waiting("device"):
            now += 5
            assert clock.totals() == {"groups": 3, "device": 5}
        now += 1
    now += 10
    assert clock.totals() == {"groups": 4, "device": 5}
