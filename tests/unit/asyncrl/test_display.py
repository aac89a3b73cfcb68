"""Plain lines of a run, from its directory."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.launch import display as module
from asyncrl.launch.display import STEPS_KEPT, Display, RunProgress
from asyncrl.telemetry.recorder import RunRecorder
from tests.rigs.shown_run import write_run


@pytest.fixture
def plain(capsys: pytest.CaptureFixture[str]) -> Callable[..., list[str]]:
    """Lines printed of a run directory that `during` changes."""

    def show(folder: Path, during: Callable[[], object] = lambda: None) -> list[str]:
        with Display(RunProgress(folder)):
            during()
        return capsys.readouterr().out.splitlines()

    return show


def test_steps_and_evaluations_have_a_line_each_once(tmp_path: Path, plain: Callable[..., list[str]]) -> None:
    lines = plain(tmp_path / "run", lambda: write_run(tmp_path / "run"))
    assert "step 40: held-out accuracy 0.875 over 16 rows, 1 without a score" in lines
    assert lines[-1] == (
        "step 40 of 100: reward 0.400, staleness 0.8, 2.00 s, 5000 tokens/s, idle learner 0.25 rollout -"
    )
    assert len(lines) == 3, "the evaluations and the newest step"
    assert plain(tmp_path / "run") == [], "a run that is resumed has printed it"


def test_a_resumed_run_does_not_repeat_what_was_printed_before(tmp_path: Path, plain: Callable[..., list[str]]) -> None:
    recorder = write_run(tmp_path)

    def resume() -> None:
        recorder.truncate_after(30, evaluations_after=30)
        recorder.step({"step": 31})
        recorder.evaluation({"step": 40, "accuracy": 0.5, "rows": 16, "errors": 0})

    assert [line.split(":")[0] for line in plain(tmp_path, resume)] == ["step 40", "step 31 of 100"]


def test_a_long_wait_is_said_with_its_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path)
    monkeypatch.setattr(module, "STUCK_S", 0.0)
    with Display(RunProgress(tmp_path)):
        pass
    said = capsys.readouterr().out
    assert said == "step 40: no new step for 0 s, training, waiting for groups of step 41 (needs 8, has 3)\n"


def test_a_long_step_is_not_said_to_wait(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path).status(phase="catching up", waiting_for="")  # a new phase is written at once
    monkeypatch.setattr(module, "STUCK_S", 0.0)
    with Display(RunProgress(tmp_path)):
        pass
    assert capsys.readouterr().out == "step 40: no new step for 0 s, catching up\n"


def test_a_run_without_spread_is_told_as_soon_as_that_is_known(tmp_path: Path, plain: Callable[..., list[str]]) -> None:
    """Three steps and 24 groups; a group of another run that has spread ends the warning."""
    recorder = RunRecorder(tmp_path)
    recorder.status(phase="training", total_steps=9)
    alike = {"groups": 8.0, "zero_variance_groups": 8.0, "teaching_groups": 0.0}
    told = []
    for step in range(1, 5):
        recorder.step({"step": step, **alike})
        told.append([line for line in plain(tmp_path) if line.startswith("warning: ")])
    assert told[:2] == [[], []]
    assert told[2] == [
        "warning: The run learns nothing (answer format? reward? stop tokens? length?): the rewards of each group of "
        "3 steps (24 groups) are all the same"
    ]
    recorder.step({"step": 5, **alike, "teaching_groups": 1.0})
    assert not any(line.startswith("warning: ") for line in plain(tmp_path))


@pytest.mark.parametrize(("dropped", "trained", "fires"), [(24, 0, True), (23, 0, False), (24, 1, False)])
def test_a_run_whose_groups_are_all_filtered_out_is_told(
    tmp_path: Path, plain: Callable[..., list[str]], dropped: int, trained: int, fires: bool
) -> None:
    groups = {"dropped": dropped, "trained": trained}
    RunRecorder(tmp_path).status(phase="training", total_steps=9, groups=groups)
    told = [line for line in plain(tmp_path) if line.startswith("warning: The run learns nothing")]
    assert [line.endswith("all 24 groups so far were dropped by algorithm.filters") for line in told] == [True] * fires


@pytest.mark.parametrize(("left", "step_s", "fires"), [(0.14, 65.0, True), (0.6, 65.0, False), (0.14, 30.0, False)])
def test_a_run_that_filters_slow_down_is_told_once(
    tmp_path: Path, plain: Callable[..., list[str]], left: float, step_s: float, fires: bool
) -> None:
    """Beyond the steps that a display keeps it remembers the first ones."""
    recorder = RunRecorder(tmp_path)
    recorder.status(phase="training", total_steps=9)
    for step in range(1, STEPS_KEPT + 8):
        slow = {"step_s": step_s, "filtered_share": 1 - left} if step > 3 else {"step_s": 13.0}
        recorder.step({"step": step, "publish_bytes": 1.0, **slow})
    told = [line for line in plain(tmp_path) if line.startswith("warning: Filters leave few groups")]
    expected = ["14% of groups in the last 3 steps; a step takes 65 s, 13 s at first"] * fires
    assert [line.rpartition(": ")[2] for line in told] == expected


def test_damaged_files_end_no_display(tmp_path: Path, plain: Callable[..., list[str]]) -> None:
    write_run(tmp_path)
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        last = json.loads((tmp_path / name).read_bytes().splitlines()[-1])
        for key in last:
            content = b"\xff\xfe\n" + json.dumps({k: last[k] for k in last if k != key}).encode() + b"\n"
            (tmp_path / name).write_bytes(content)
            plain(tmp_path)
    (tmp_path / "status.json").write_bytes(b"[" * 100_000)
    run = RunProgress(tmp_path)
    run.refresh()
    assert (run.phase, run.has_ended) == ("starting", False)


def test_a_change_that_was_accepted_is_said_once(tmp_path: Path, plain: Callable[..., list[str]]) -> None:
    recorder = write_run(tmp_path)
    changed = "steps after 40 are of other inputs: rw.py is not what it was"
    assert plain(tmp_path, lambda: recorder.status(phase="starting", inputs_changed=changed)) == [f"warning: {changed}"]


@pytest.mark.parametrize(("age_s", "started", "warns"), [(10.0, True, False), (10.0, False, False), (-1.0, True, True)])
def test_a_resumed_run_is_not_warned_of_steps_before_it(
    tmp_path: Path, age_s: float, started: bool, warns: bool
) -> None:
    now = time.time()
    flat = {"groups": 8.0, "zero_variance_groups": 8.0, "teaching_groups": 0.0, "time": now - age_s}
    status = {"phase": "training"} if started else {}
    run = RunProgress(tmp_path, since=now, status=status, steps=[{"step": n, **flat} for n in range(1, 4)])
    assert bool(run.warnings()) == warns
