"""The panel answers its three questions from the run directory, whatever is missing there."""

from __future__ import annotations

import io
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from asyncrl.launch.display import Display
from asyncrl.launch.glyphs import Glyphs, slice_means
from asyncrl.launch.panel import RunPanel
from asyncrl.launch.story import Story
from asyncrl.launch.wording import duration
from asyncrl.telemetry.recorder import RunRecorder


def write_run(folder: Path, steps: int = 40) -> RunRecorder:
    recorder = RunRecorder(folder)
    for step in range(1, steps + 1):
        recorder.step(
            {
                "step": step,
                "version": step,
                "reward/mean": step / 100,
                "reward/exact_match": step / 200,
                "loss": 0.0123,
                "grad_norm": 1.5,
                "entropy": 0.9,
                "lr": 1e-5,
                "staleness/mean": 0.8,
                "staleness/max": 2,
                "idle/learner": 0.25,
                "tokens_per_s/learner": 5000.0,
                "rows/finished": 60,
                "rows/error": 3,
                "step_s": 2.0,
            }
        )
    recorder.evaluation({"step": 0, "version": 0, "accuracy": 0.125, "reward": 0.1, "rows": 16, "errors": 0})
    recorder.evaluation({"step": 40, "version": 40, "accuracy": 0.875, "reward": 0.8, "rows": 16, "errors": 1})
    completions = [
        {"text": "it is seven", "reward": 1.0},
        {"text": "it is \x1b[2J\x1b[31mnine", "reward": 0.0},
        {"text": "never scored", "reward": None},
    ]
    recorder.sample({"step": 40, "prompt": "which digit?", "answer": "7", "completions": completions}, {})
    recorder.status(
        phase="training",
        waiting_for="groups of step 41 (needs 8, has 3)",
        total_steps=100,
        version=40,
        servers=[{"id": "a", "version": 39}],
        groups={"in_flight": 12, "buffered": 3},
        errors={"reward_timeout": 3},
    )
    return recorder


def text_of(folder: Path, width: int = 110) -> str:
    console = Console(file=io.StringIO(), width=width, height=60, force_terminal=True, color_system="truecolor")
    story = Story(folder)
    story.refresh()
    with console.capture() as capture:
        console.print(RunPanel(story))
    return re.sub(r"\x1b\[[0-9;]*m", "", capture.get())  # our own colours


@pytest.mark.parametrize("width", [80, 110, 160])
def test_the_panel_answers_all_three_questions(tmp_path: Path, width: int) -> None:
    write_run(tmp_path / "run")
    shown = text_of(tmp_path / "run", width)
    for part in (
        *("Is it learning?", "0.400", "exact_match 0.200", "0.125", "0.875", "0.0123"),
        *("Is the pipeline healthy?", "in_flight 12", "needs 8, has 3", "reward_timeout 3", "finished 60"),
        *("What does it write?", "it is seven", "which digit?"),
    ):
        assert part in shown, part


def test_a_terminal_of_24_lines_is_enough(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=80, height=24)
    with Display(Story(tmp_path / "run"), console) as display:
        display.tick()
        shown = output.getvalue()
    assert "it is seven" in shown
    assert "..." not in shown, "nothing is cut off"


def test_what_a_model_writes_cannot_steer_the_terminal(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    shown = text_of(tmp_path / "run")
    assert "\x1b[2J" not in shown
    assert "\\x1b[2J" in shown, "it is shown, not hidden"


RECORDS: list[tuple[str, dict[str, Any]]] = [
    ("metrics.jsonl", {"step": 1}),
    ("metrics.jsonl", {"loss": 1.0}),
    ("metrics.jsonl", {"step": 1, "reward/mean": None, "rows/error": None, "step_s": None, "lr": None}),
    ("evaluations.jsonl", {"step": 0}),
    ("evaluations.jsonl", {"step": 0, "accuracy": None}),
    ("samples.jsonl", {"step": 1}),
    ("samples.jsonl", {"step": 1, "completions": [{"reward": 1.0}]}),
    ("samples.jsonl", {"step": 1, "completions": [{"reward": None, "text": "x"}]}),
    ("status.json", {"phase": "starting"}),
    ("status.json", {"total_steps": 9, "servers": [{"id": "a"}], "groups": {}}),
]


@pytest.mark.parametrize(("name", "record"), RECORDS)
def test_missing_keys_do_not_end_a_run(tmp_path: Path, name: str, record: dict[str, Any]) -> None:
    (tmp_path / name).write_text(f"{json.dumps(record)}\n" * (1 if name.endswith(".json") else 4))
    assert "Is it learning?" in text_of(tmp_path)
    assert "\x1b" not in plain(tmp_path)


def test_an_empty_run_directory_is_shown_too(tmp_path: Path) -> None:
    assert "nothing yet" in text_of(tmp_path)


def plain(folder: Path, during: Callable[[], object] = lambda: None) -> str:
    """What is printed where there is no terminal, of a run directory that changes by `during`."""
    output = io.StringIO()
    with Display(Story(folder), Console(file=output, force_terminal=False, width=80)) as display:
        during()
        display.tick()
    return output.getvalue()


def test_without_a_terminal_there_are_plain_lines(tmp_path: Path) -> None:
    lines = plain(tmp_path / "run", lambda: write_run(tmp_path / "run")).splitlines()
    assert "\x1b" not in "".join(lines)
    assert any(line.startswith("step 40 of 100: reward 0.400") for line in lines)
    assert "step 40: held-out accuracy 0.875 over 16 rows, 1 without a score" in lines
    assert len(lines) == 3, "nothing is said twice"


def test_a_resumed_run_does_not_repeat_what_was_told_before(tmp_path: Path) -> None:
    recorder = write_run(tmp_path)

    def resume() -> None:
        recorder.truncate_after(30, evaluations_after=30)
        recorder.step({"step": 31})
        recorder.evaluation({"step": 40, "accuracy": 0.5, "rows": 16, "errors": 0})

    lines = plain(tmp_path, resume).splitlines()
    assert [line.split(":")[0] for line in lines] == ["step 40", "step 31 of 100"]


def test_the_status_of_an_earlier_process_is_not_shown(tmp_path: Path) -> None:
    write_run(tmp_path)
    story = Story(tmp_path, since=time.time() + 60)
    story.refresh()
    assert story.status == {}
    story.since = 0.0
    story.refresh()
    assert story.status["phase"] == "training"


def test_the_story_follows_a_growing_and_a_cut_file(tmp_path: Path) -> None:
    recorder = write_run(tmp_path, steps=5)
    story = Story(tmp_path)
    story.refresh()
    recorder.step({"step": 6, "step_s": 2.0})
    story.refresh()
    assert [step["step"] for step in story.steps] == [1, 2, 3, 4, 5, 6]
    recorder.truncate_after(3, evaluations_after=3)
    story.refresh()
    assert [step["step"] for step in story.steps] == [1, 2, 3]
    assert story.good["completion"]["reward"] == 1.0
    assert story.bad["completion"]["reward"] == 0.0


def test_a_sparkline_shows_the_course_in_few_characters() -> None:
    glyphs = Glyphs.of("utf-8")
    assert glyphs.sparkline([]) == ""
    assert glyphs.sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert slice_means([float(n) for n in range(1000)], 4) == [124.5, 374.5, 624.5, 874.5]
    assert set(glyphs.sparkline([0.5] * 10)) == {"▁"}


def test_durations_are_said_in_words() -> None:
    assert [duration(seconds) for seconds in (None, 5, 61, 3700)] == ["-", "0 min 05 s", "1 min 01 s", "1 h 01 min"]
