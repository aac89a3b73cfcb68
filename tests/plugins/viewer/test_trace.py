"""`asyncrl report --trace`: every span of a run as Perfetto reads it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncrl.cli import main
from asyncrl.telemetry.jsonl import read_lines


def test_a_trace_has_every_recorded_span_in_its_place(
    finished_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "trace.json"
    assert main(["report", str(finished_run), "--trace", str(target)]) == 0
    assert "ui.perfetto.dev" in capsys.readouterr().out
    events = json.loads(target.read_text())["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M"}
    found = [e for e in events if e["ph"] == "X"]
    assert all(e["ts"] >= 0 and e["dur"] >= 0 for e in found)
    assert min(e["ts"] for e in found) == 0
    assert {names[e["pid"], e["tid"]] for e in found} == {e["name"] for e in found}
    recorded = read_lines(finished_run / "timeline.jsonl")
    told = sorted((names[e["pid"], 0], e["name"], e["dur"]) for e in found)
    for span in recorded:
        assert (span["who"], span["what"], round(1e6 * (span["until"] - span["since"]))) in told
    steps = read_lines(finished_run / "metrics.jsonl")
    learnt = [duration for who, what, duration in told if (who, what) == ("learner", "learning")]
    assert len(learnt) == len(steps)
    assert sum(learnt) / 1e6 == pytest.approx(sum(step["learn_s"] for step in steps), abs=1e-3)


def test_two_runs_are_processes_of_their_own_and_a_run_without_time_is_refused(
    finished_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, empty = tmp_path / "trace.json", tmp_path / "empty"
    assert main(["report", str(finished_run), str(finished_run), "--trace", str(target)]) == 0
    names = [e["args"]["name"] for e in json.loads(target.read_text())["traceEvents"] if e["name"] == "process_name"]
    assert f"{finished_run.name}: learner" in names
    empty.mkdir()
    (empty / "metrics.jsonl").write_text("")
    assert main(["report", str(empty), "--trace", str(target)]) == 2
    assert "nothing has recorded its time" in capsys.readouterr().err
