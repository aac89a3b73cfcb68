"""A short real run tells of its servers' time and of its environment, and its report shows both."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from asyncrl.config.schema import RunConfig
from asyncrl.telemetry.environment import read_starts
from asyncrl.tools.report.activity import lanes
from asyncrl.tools.report.recorded_run import RecordedRun, read_run
from asyncrl.tools.report.write import write_report
from tests.rigs.small_runs import logs
from tests.rigs.two_processes import run_both

pytestmark = pytest.mark.slow


def seconds(run: RecordedRun, lane_name: str) -> dict[str, float]:
    lane = next(lane for lane in lanes(run) if lane.name.startswith(lane_name))
    return {what: sum(b - a for a, b in spans) for what, spans in lane.parts.items()}


def server_of(run: RecordedRun) -> str:
    (name,) = {span["who"] for span in run.spans} - {"learner"}
    return name


def test_a_run_records_who_did_what_and_on_what(make_config: Callable[..., RunConfig], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    config = make_config(
        learner={"max_staleness": 1},
        evaluation={"before_training": True},
        trainer={"max_steps": 5, "save_freq": 2, "samples_per_step": 1},
    )
    assert run_both(config, folder) == (0, 0), logs(folder)
    run = read_run(folder)
    assert run.missing == []
    (start,) = read_starts(folder)
    assert start["step"] == 0
    assert start["packages"]["torch"]
    spent, server = seconds(run, "learner"), server_of(run)
    assert all(spent[what] > 0 for what in ("learning", "publishing", "waiting", "evaluating", "saving")), spent
    loaded = [span["version"] for span in run.spans if span["what"] == "loading"]
    assert loaded
    assert set(loaded) <= set(range(6))
    at_work = seconds(run, server)
    assert at_work["generating"] > 0
    assert at_work["generating"] + at_work["idle"] > 0.2
    # Every token that was sampled is in one span of the server's, and heartbeats come until the end.
    tokens = sum(span["tokens"] for span in run.spans if span["what"] == "usage")
    assert tokens >= sum(run.values("tokens"))
    assert run.clock is not None
    assert all(run.clock[0] - 60 < span["since"] <= span["until"] < run.clock[1] + 60 for span in run.spans)
    page = write_report([folder]).read_text()
    assert server in page
    assert start["packages"]["torch"] in page


def test_in_sync_mode_the_turns_are_recorded(make_config: Callable[..., RunConfig], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    config = make_config(trainer={"mode": "sync", "max_steps": 4, "samples_per_step": 1}, data={"val_files": []})
    assert run_both(config, folder) == (0, 0), logs(folder)
    run = read_run(folder)
    spent, server, device = (seconds(run, name) for name in ("learner", server_of(run), "device"))
    asleep = sum(run.values("asleep_s/learner"))
    assert spent["asleep"] == pytest.approx(asleep, rel=0.3, abs=0.2)
    assert server["generating"] > 0
    # Engine and learner are never at work at the same time.
    parts = {lane.name: lane.parts for lane in lanes(run)}
    work = [*parts["learner"]["learning"], *parts[server_of(run)]["generating"]]
    work.sort()
    assert all(before[1] <= after[0] + 0.05 for before, after in pairwise(work)), json.dumps(work)
    assert device["server's turn"] > 0
    assert device["learner's turn"] > 0
    assert device["handing over"] > 0
