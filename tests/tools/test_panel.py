"""The panel answers its three questions from the run directory, whatever is missing there."""

from __future__ import annotations

import html
import io
import json
import os
import re
import runpy
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.cells import cell_len
from rich.console import Console

from asyncrl.cli import main
from asyncrl.errors import UserError
from asyncrl.telemetry.alert_thresholds import NOT_IN_A_RUN_DIRECTORY
from asyncrl.telemetry.jsonl import JsonlTail
from asyncrl.telemetry.recorder import RunRecorder, read_status
from asyncrl.tools.panel.alerts import CONDITIONS, alerts
from asyncrl.tools.panel.display import Display
from asyncrl.tools.panel.formatting import Glyphs, duration, slice_means, time_left
from asyncrl.tools.panel.panel import RunPanel
from asyncrl.tools.panel.run_snapshot import RunSnapshot, seconds_per_step
from tests.rigs.tiny import ROOT


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


def text_of(folder: Path, width: int = 110, height: int = 60) -> str:
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=True, color_system="truecolor")
    story = RunSnapshot(folder)
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


def test_values_stand_below_each_other_and_a_number_that_is_cut_looks_cut(tmp_path: Path) -> None:
    recorder = write_run(tmp_path / "run")
    rewards = [("much too good", 1234567.0), ("bad", -12345.678)]
    completions = [{"text": text, "reward": reward} for text, reward in rewards]
    recorder.sample({"step": 41, "prompt": "which digit?", "answer": "7", "completions": completions}, {})
    lines = text_of(tmp_path / "run").splitlines()
    values = (
        "0.400",
        "version 40",
        "1 at version",
        "in_flight 12",
        "groups of step 41",
        "much too good",
        "which digit?",
    )
    columns = {value: {line.index(value) for line in lines if value in line} for value in values}
    assert len(set().union(*columns.values())) == 1, "\n".join(lines)
    assert all(columns.values()), "\n".join(lines)
    assert any("good 123456… " in line for line in lines)
    assert any("bad -12345.… " in line for line in lines)


@pytest.mark.parametrize(("width", "height"), [(16, 24), (20, 24), (30, 13), (80, 24)])
def test_the_panel_is_no_larger_than_its_terminal(tmp_path: Path, width: int, height: int) -> None:
    write_run(tmp_path / "run")
    lines = text_of(tmp_path / "run", width, height).splitlines()
    assert len(lines) <= height, "\n".join(lines)
    assert {len(line) for line in lines} == {width}
    assert any("0.400" in line for line in lines), "names leave room for values\n" + "\n".join(lines)


@pytest.mark.parametrize("width", range(1, 16))
def test_no_terminal_is_too_narrow_to_go_on(tmp_path: Path, width: int) -> None:
    write_run(tmp_path / "run")
    assert text_of(tmp_path / "run", width, 24)


def test_a_terminal_of_24_lines_is_enough(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=80, height=24)
    with Display(RunSnapshot(tmp_path / "run"), console) as display:
        display.tick()
        shown = output.getvalue()
    assert "it is seven" in shown
    assert "..." not in shown, "nothing is cut off"


@pytest.mark.parametrize(
    ("cpu_s", "pictures"), [(0.001, 60), (0.012, 25), (1.0, 12)], ids=["cheap", "its share", "never later than 5 s"]
)
def test_a_picture_that_costs_more_is_drawn_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cpu_s: float, pictures: int
) -> None:
    now = cpu = 0.0
    monkeypatch.setattr("asyncrl.tools.panel.display.time.monotonic", lambda: now)
    monkeypatch.setattr("asyncrl.tools.panel.display.time.thread_time", lambda: cpu)
    drawn: list[float] = []

    class SlowSnapshot(RunSnapshot):
        def refresh(self) -> None:
            nonlocal cpu
            cpu += cpu_s
            drawn.append(now)

    display = Display(SlowSnapshot(tmp_path), Console(file=io.StringIO(), force_terminal=True))
    for tick in range(600):
        now = 0.1 * tick
        display.tick()
    assert len(drawn) == pytest.approx(pictures, abs=1), drawn


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
    with Display(RunSnapshot(folder), Console(file=output, force_terminal=False, width=80)) as display:
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
    story = RunSnapshot(tmp_path, since=time.time() + 60)
    story.refresh()
    assert story.status == {}
    story.since = 0.0
    story.refresh()
    assert story.status["phase"] == "training"


def test_the_story_follows_a_growing_and_a_cut_file(tmp_path: Path) -> None:
    recorder = write_run(tmp_path, steps=5)
    story = RunSnapshot(tmp_path)
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
    assert [duration(seconds) for seconds in (5, 61, 3700)] == ["0 min 05 s", "1 min 01 s", "1 h 01 min"]


# --- terminals of every kind ---------------------------------------------------------------------


def shown(folder: Path, width: int, height: int, encoding: str = "utf-8") -> list[str]:
    """Lines of the panel, without its colours."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)  # strict: what cannot be encoded raises
    console = Console(file=stream, width=width, height=height, force_terminal=True)
    story = RunSnapshot(folder)
    story.refresh()
    console.print(RunPanel(story))
    stream.flush()
    stream.seek(0)
    return re.sub(r"\x1b\[[0-9;]*m", "", stream.read()).splitlines()


@pytest.mark.parametrize(("width", "height"), [(40, 15), (60, 20), (60, 24), (80, 24), (100, 30), (200, 60)])
def test_the_panel_fits_and_a_small_one_keeps_what_matters(tmp_path: Path, width: int, height: int) -> None:
    recorder = write_run(tmp_path)
    recorder.step({"step": 41, "loss": None, **{f"reward/component_{n}": n / 10 for n in range(12)}})
    lines = shown(tmp_path, width, height)
    assert len(lines) <= height
    assert {cell_len(line) for line in lines} == {width}
    text = "\n".join(lines)
    for part in ("reward", "held-out", "WARNING", "waiting for", "errors", "it is seven", "What does it write?"):
        assert part in text, part


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_a_terminal_shows_what_its_encoding_can(tmp_path: Path, encoding: str) -> None:
    recorder = write_run(tmp_path)
    completions = [{"text": "漢字 é \u202e\udc80 🙂", "reward": 1.0}, {"text": "x" * 300, "reward": 0.0}]
    recorder.sample({"step": 41, "prompt": "何の数字？", "answer": "七", "completions": completions}, {})
    lines = shown(tmp_path, 120, 30, encoding)
    assert {cell_len(line) for line in lines} == {120}
    text = "\n".join(lines)
    assert ("漢字" in text) == (encoding == "utf-8")
    assert ("\\u6f22\\u5b57" in text) == (encoding != "utf-8")
    assert ("é" in text) == (encoding != "ascii")
    assert "\\u202e\\udc80" in text, "what turns text around or is none is shown as a number"
    assert ("█" in text) == (encoding == "utf-8")


def test_wide_characters_are_cut_between_cells() -> None:
    glyphs = Glyphs.of("utf-8")
    assert glyphs.cut("漢字漢字", 8) == "漢字漢字"
    assert [cell_len(glyphs.cut("漢字漢字", cells)) for cells in (7, 6, 5)] == [7, 5, 5]
    assert glyphs.lines("漢字漢字漢字", 5, 2) == ["漢字", "漢字…"]
    assert glyphs.lines("", 5, 2) == [""]


def test_force_color_makes_no_terminal_of_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_run(tmp_path)
    code = f"from asyncrl.cli import main; main(['watch', {str(tmp_path)!r}])"
    RunRecorder(tmp_path).status(phase="finished")
    environment = {**os.environ, "FORCE_COLOR": "1", "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment, timeout=60, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.decode("ascii").splitlines()
    assert "\x1b" not in "".join(lines)
    assert [line.split(":")[0] for line in lines] == ["step 0", "step 40", "step 40 of ?"]


# --- how long it takes ---------------------------------------------------------------------------


def steps_of(process: float, first: int, last: int, pace: float, pauses: dict[int, float] | None = None) -> list[dict]:
    """Lines of one process that began at this Unix time; its pauses come before the steps that they are named by."""
    lines, uptime = [], 10.0
    for step in range(first, last + 1):
        uptime += pace + (pauses or {}).get(step, 0.0)
        lines.append({"step": step, "time": process + uptime, "uptime_s": uptime, "step_s": pace, "publish_bytes": 9.0})
    return lines


def test_evaluations_and_checkpoints_are_part_of_the_pace() -> None:
    steps = steps_of(1000.0, 1, 101, 2.0, {26: 30.0, 51: 30.0, 76: 30.0, 101: 30.0})
    assert seconds_per_step(steps) == pytest.approx(2.0 + 4 * 30 / 100)
    assert seconds_per_step(steps[:3]) is None, "two intervals say little"


def test_time_between_two_processes_does_not_count_and_their_steps_do() -> None:
    before, after = steps_of(1000.0, 1, 50, 2.0), steps_of(90_000.0, 51, 52, 2.0)
    assert seconds_per_step(before + after) == pytest.approx(2.0)
    again = [{**line, "publish_bytes": 0.0} for line in steps_of(90_000.0, 51, 70, 0.1)]
    assert seconds_per_step(before + again) == pytest.approx(2.0), "made again from the journal: no pace of a run"


def test_a_slower_process_is_believed_after_some_steps() -> None:
    steps = steps_of(1000.0, 1, 50, 2.0) + steps_of(90_000.0, 51, 90, 4.0)
    assert seconds_per_step(steps) == pytest.approx(4.0)


def test_the_time_left_is_said_with_the_clock(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path)
    for line in steps_of(time.time() - 10.0 - 20 * 60.0, 1, 20, 60.0):
        recorder.step(line)
    recorder.status(phase="training", total_steps=50)
    story = RunSnapshot(tmp_path)
    story.refresh()
    assert story.seconds_left() == pytest.approx(30 * 60.0, abs=5)
    assert re.fullmatch(r"(30 min 0|29 min 5)\d s left, (\w{3} )?\d\d:\d\d", time_left(story))
    recorder.status(phase="finished")
    story.refresh()
    assert time_left(story) == "finished after 20 min 10 s"


def test_a_long_run_is_followed_in_little_memory(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {n}, "reward/mean": {n}}}\n' for n in range(1, 3001)))
    line = json.dumps({"step": 1, "prompt": "x" * 1000, "completions": [{"text": "y", "reward": 1.0}]}) + "\n"
    (tmp_path / "samples.jsonl").write_text(line * 5000)
    story = RunSnapshot(tmp_path)
    story.refresh()
    assert (len(story.steps), len(story.rewards)) == (512, 3000)
    assert story.good["completion"]["text"] == "y"
    assert JsonlTail(tmp_path / "samples.jsonl", newest_bytes=3000).new_records()[0] == [json.loads(line)] * 2


# --- warnings ------------------------------------------------------------------------------------

HEALTHY = {
    "loss": 0.1,
    "grad_norm": 1.0,
    "ledger_residual": 0,
    "staleness/mean": 2.0,
    "staleness/bound": 2.0,
    "idle/learner": 0.1,
    "ess": 0.9,
    "mismatch_kl_k3": 0.001,
    "entropy": 0.5,
    "rows/finished": 90.0,
    "rows/error": 1.0,
}


def story_of(folder: Path, **values: Any) -> RunSnapshot:
    recorder = RunRecorder(folder)
    for step in range(1, 41):
        recorder.step({"step": step, **HEALTHY, "reward/mean": step / 40, **values})
    recorder.status(phase="training", servers=[{"id": "a"}])
    story = RunSnapshot(folder)
    story.refresh()
    return story


BAD: list[tuple[str, dict[str, Any]]] = [
    ("NotANumber", {"loss": float("nan")}),
    ("NotANumber", {"grad_norm": float("inf")}),
    ("LedgerResidual", {"ledger_residual": 1}),
    ("StalenessAtBound", {"idle/learner": 0.5}),
    ("EffectiveSampleSizeCollapse", {"ess": 0.4}),
    ("MismatchKl", {"mismatch_kl_k3": 0.06}),
    ("EntropyCollapse", {"entropy": 0.01}),
    ("RewardsFail", {"rows/error": 10.0}),
    ("LearnerStarves", {"idle/learner": 0.9, "staleness/mean": 0.0}),
]


def test_a_healthy_run_has_no_warning(tmp_path: Path) -> None:
    assert alerts(story_of(tmp_path)) == {}


@pytest.mark.parametrize(("name", "values"), BAD)
def test_each_warning_is_said(tmp_path: Path, name: str, values: dict[str, Any]) -> None:
    story = story_of(tmp_path, **values)
    assert list(alerts(story)) == [name]
    story.status["phase"] = "failed"
    assert alerts(story) == {}, "of a run that has ended nothing can be mended"


def test_held_out_that_falls_while_reward_rises_is_a_warning(tmp_path: Path) -> None:
    story = story_of(tmp_path)
    story.evaluations = [
        {"step": step, "accuracy": accuracy, "rows": 400, "errors": 0}
        for step, accuracy in ((0, 0.5), (20, 0.8), (40, 0.7))
    ]
    assert alerts(story) == {"RewardHacking": "held-out fell by 0.10 while reward rises: look at samples"}
    story.rewards = [(step, 1 - step / 40) for step in range(1, 41)]
    assert alerts(story) == {}, "both fall: another illness"


def test_held_out_of_few_rows_that_falls_by_chance_is_no_warning(tmp_path: Path) -> None:
    story = story_of(tmp_path)
    story.evaluations = [{"step": step, "accuracy": a, "rows": 60, "errors": 0} for step, a in ((20, 0.6), (40, 0.5))]
    assert alerts(story) == {}
    story.evaluations[-1] |= {"accuracy": 0.3}
    assert list(alerts(story)) == ["RewardHacking"]


def test_a_learner_that_answers_and_makes_no_step_is_a_warning(tmp_path: Path) -> None:
    story = story_of(tmp_path)
    now = time.time()
    (tmp_path / "environment.json").write_text(json.dumps({"starts": [{"time": now - 9000, "step": 0}]}))
    story.steps = [{**step, "time": now - 1000 - 60 * (40 - step["step"]), "step_s": 60.0} for step in story.steps]
    assert alerts(story) == {"NoProgress": "no step for 17 min"}
    story.status["phase"] = "evaluating"
    assert alerts(story) == {}
    story.status["phase"] = "training"
    story.steps = [{**step, "step_s": 600.0} for step in story.steps]
    assert alerts(story) == {}, "steps take so long here"
    story.since = now - 1000
    assert alerts(story) == {}, "the first step of a process takes longer"
    story.since = now - 2000
    story.steps = []
    (tmp_path / "environment.json").unlink()
    assert alerts(story) == {"NoProgress": "no step for 33 min"}


def test_silence_and_an_empty_room_are_warnings(tmp_path: Path) -> None:
    story = story_of(tmp_path)
    story.status |= {"time": time.time() - 300, "servers": []}
    assert list(alerts(story)) == ["LearnerSilent", "NoRolloutServer"]


def test_warnings_are_those_of_prometheus() -> None:
    groups = yaml.safe_load((ROOT / "docker" / "prometheus" / "alerts.yml").read_text())["groups"]
    there = {rule["alert"] for group in groups for rule in group["rules"] if "alert" in rule}
    assert CONDITIONS.keys() <= there
    by_prometheus_alone = {*NOT_IN_A_RUN_DIRECTORY, "RunStopped"} - {"NoRolloutServer"}
    assert there - CONDITIONS.keys() == by_prometheus_alone


def test_plain_lines_say_a_warning_once_and_what_a_long_wait_is_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("asyncrl.tools.panel.display.STUCK_S", 0.0)
    story_of(tmp_path, entropy=0.01)
    RunRecorder(tmp_path).status(phase="training", waiting_for="groups of step 41", servers=[{"id": "a"}])
    output = io.StringIO()
    with Display(RunSnapshot(tmp_path), Console(file=output, width=80)) as display:
        for _ in range(3):
            display._show()
    lines = output.getvalue().splitlines()
    assert lines.count("warning: entropy 0.010 nats per token: hardly any exploration") == 1
    assert "step 40: no other for 0 s, training, waiting for groups of step 41" in lines


# --- asyncrl watch -------------------------------------------------------------------------------


def test_watch_follows_a_run_of_another_process_to_its_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorder = write_run(tmp_path)
    ending = threading.Timer(0.5, lambda: recorder.status(phase="finished"))
    ending.start()
    assert main(["watch", str(tmp_path)]) == 0
    assert "step 40 of 100: reward 0.400" in capsys.readouterr().out
    recorder.status(phase="failed", time=time.time() - 3600)
    status = read_status(tmp_path)
    (tmp_path / "status.json").write_text(json.dumps({**status, "time": time.time() - 3600}))
    assert main(["watch", str(tmp_path)]) == 1


def test_watch_refuses_a_folder_without_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(tmp_path)]) == 2
    assert "there is no run in" in capsys.readouterr().err


def test_the_picture_of_the_panel_is_a_picture(tmp_path: Path) -> None:
    write_run(tmp_path)
    svg = runpy.run_path(str(ROOT / "scripts" / "make_panel_picture.py"))["panel_picture"](tmp_path)
    words = html.unescape(re.sub(r"<[^>]*>", "", svg)).replace("\xa0", " ")
    assert svg.startswith("<svg")
    assert "Is the pipeline healthy?" in words


def test_the_terminal_has_its_cursor_back_whatever_ends_the_display(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = io.StringIO()
    display = Display(RunSnapshot(tmp_path), Console(file=shown, force_terminal=True, width=80, height=24))

    def unreadable() -> None:
        raise UserError("cannot read status.json")

    display.__enter__()
    assert "\x1b[?25h" not in shown.getvalue(), "it is hidden"
    monkeypatch.setattr(display.run, "refresh", unreadable)
    with pytest.raises(UserError):
        display.__exit__(None, None, None)
    assert "\x1b[?25h" in shown.getvalue()
