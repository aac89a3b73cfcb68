"""A tracker of the user's own is a class in a file, named by its path."""

from __future__ import annotations

import json
import logging
from collections import Counter
from pathlib import Path

import pytest

from asyncrl.config.run_sections import TelemetryConfig
from asyncrl.errors import UserError
from asyncrl.telemetry.recorder import RunRecorder
from asyncrl.telemetry.tracker import TrackedRun, check_trackers, open_trackers, tracker_sources
from tests.unit.asyncrl.test_trackers import record_steps

METHODS = {
    "__init__": "def __init__(self, run, settings): self.seen, self.file = [], run.run_path / 'seen.json'",
    "step": "def step(self, step, metrics): self.seen.append(['step', step, metrics['reward/mean']])",
    "evaluation": "def evaluation(self, step, results): self.seen.append(['evaluation', step, results['accuracy']])",
    "samples": "def samples(self, step, samples): self.seen.append(['samples', step, samples[0].pictures()[0].size])",
    "close": "def close(self): self.file.write_text(json.dumps(self.seen))",
}


def written(folder: Path, *left_out: str, **changed: str) -> TelemetryConfig:
    """A file with the class `Mine`, below three other lines, and the setting that names it."""
    methods = {name: line for name, line in {**METHODS, **changed}.items() if name not in left_out}
    source = "\n".join(["import json", "import sys", "", "class Mine:", *(f"    {line}" for line in methods.values())])
    (folder / "mine.py").write_text(f"{source}\n")
    return TelemetryConfig.model_validate({"trackers": [f"{folder}/mine.py:Mine"]})


def record(folder: Path, telemetry: TelemetryConfig, steps: int = 20) -> Counter[str]:
    errors = Counter[str]()
    recorder = RunRecorder(folder, open_trackers(telemetry, TrackedRun(folder, {}), errors))
    recorder.evaluation({"step": 0, "accuracy": 0.5})
    record_steps(recorder, 1, steps)
    recorder.close()
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == steps
    return errors


def test_a_class_by_its_path_gets_steps_evaluations_and_samples_with_their_pictures(tmp_path: Path) -> None:
    telemetry = written(tmp_path)
    check_trackers(telemetry)
    assert record(tmp_path, telemetry) == {}
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert seen[:2] == [["evaluation", 0, 0.5], ["step", 1, 0.1]]
    assert seen[-2:] == [["step", 20, 2.0], ["samples", 20, [512, 256]]]


@pytest.mark.parametrize(
    ("left_out", "changed", "lacks"),
    [
        ("samples", {}, "has no plain method samples (arguments: 3, `self` among them)"),
        ("__init__", {}, "has no plain method __init__ (arguments: 3, `self` among them)"),
        ("", {"close": "def close(self, code): pass"}, "has no plain method close (arguments: 1, `self` among them)"),
        (
            "",
            {"__init__": "def __init__(self, run): pass"},
            "has no plain method __init__ (arguments: 3, `self` among them)",
        ),
        (
            "",
            {"step": "async def step(self, step, metrics): pass"},
            "has no plain method step (arguments: 3, `self` among them)",
        ),
        ("", {"step": "step = 3"}, "has no plain method step (arguments: 3, `self` among them)"),
    ],
)
def test_a_class_that_is_no_tracker_is_refused_with_its_line_and_what_it_lacks(
    tmp_path: Path, left_out: str, changed: dict[str, str], lacks: str
) -> None:
    with pytest.raises(UserError) as refused:
        check_trackers(written(tmp_path, left_out, **changed))
    assert f"telemetry.trackers: Mine ({tmp_path}/mine.py:4) {lacks}" in str(refused.value)
    assert "A tracker has __init__, step, evaluation, samples, close" in str(refused.value)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("mine.py:Min", "mine.py has no function 'Min'. Did you mean 'Mine'?"),
        ("mine.py:show", "show ({folder}/mine.py:10) has no plain method step"),
        ("other.py:Mine", "there is no file"),
        ("broken.py:Mine", "broken.py cannot be imported: ZeroDivisionError: division by zero (broken.py:1)"),
        ("no.such_module:Mine", "Python finds no module no.such_module"),
    ],
)
def test_a_name_that_leads_nowhere_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path, close="def close(self): pass")
    with (tmp_path / "mine.py").open("a") as file:
        file.write("def show(run, settings): pass\n")
    (tmp_path / "broken.py").write_text("1 / 0\n")
    with pytest.raises(UserError) as refused:
        check_trackers(TelemetryConfig.model_validate({"trackers": name}))
    assert says.format(folder=tmp_path) in str(refused.value)


@pytest.mark.parametrize(
    ("changed", "failures", "reason"),
    [
        ({"step": "def step(self, step, metrics): metrics['nothing']"}, 20, "KeyError: 'nothing' (mine.py:6 in step)"),
        ({"samples": "def samples(self, step, samples): sys.exit(3)"}, 1, "SystemExit: 3 (mine.py:8 in samples)"),
        (
            {"__init__": "def __init__(self, run, settings): raise OSError('no route')"},
            1,
            "it could not be opened: OSError: no route (mine.py:5 in __init__)",
        ),
    ],
    ids=["at each step", "by leaving", "at opening"],
)
def test_one_that_fails_is_counted_by_its_class_and_said_with_its_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, changed: dict[str, str], failures: int, reason: str
) -> None:
    telemetry = written(tmp_path, **changed)
    check_trackers(telemetry)
    with caplog.at_level(logging.WARNING):
        assert record(tmp_path, telemetry) == {"tracker_Mine": failures}
    assert f"{tmp_path}/mine.py:Mine lost some data; the run continues: {reason}" in caplog.text


def test_one_whose_file_goes_away_under_the_run_ends_nothing(tmp_path: Path) -> None:
    telemetry = written(tmp_path)
    (tmp_path / "mine.py").unlink()
    assert tracker_sources(telemetry) == {}
    assert record(tmp_path, telemetry) == {"tracker_Mine": 1}


def test_its_fingerprint_is_that_of_its_file_and_of_those_that_it_imports(tmp_path: Path) -> None:
    telemetry = written(tmp_path, __init__=f"import beside\n    {METHODS['__init__']}")
    (tmp_path / "beside.py").write_text("A = 1\n")
    (name,) = telemetry.trackers
    first = tracker_sources(telemetry)
    (tmp_path / "beside.py").write_text("A = 2\n")
    assert first.keys() == {name}
    assert tracker_sources(telemetry) != first
    assert tracker_sources(TelemetryConfig()) == {}


def test_a_file_without_the_name_of_its_class_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"telemetry\.trackers is 'mine\.py', .*; your own is path/to/file\.py:Class"):
        TelemetryConfig(trackers=("mine.py",))
