"""The panel, plain lines and `asyncrl watch` show a run from its directory, whatever is missing or damaged there."""

from __future__ import annotations

import io
import json
import re
import threading
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from asyncrl.cli import main
from asyncrl.launch.command import READER_GONE
from asyncrl.telemetry.jsonl import JsonlTail
from asyncrl.telemetry.recorder import RunRecorder
from asyncrl_plugins.viewer.panel.console import Console
from asyncrl_plugins.viewer.panel.display import RunDisplay
from asyncrl_plugins.viewer.panel.formatting import time_left
from asyncrl_plugins.viewer.panel.panel import RunPanel
from asyncrl_plugins.viewer.panel.run_snapshot import RunSnapshot, seconds_per_step
from tests.rigs.shown_run import STEP, write_run
from tests.unit.asyncrl.test_command import ASYNCRL, run_unread


def snapshot(folder: Path) -> RunSnapshot:
    run = RunSnapshot(folder)
    run.refresh()
    return run


def text_of(folder: Path, width: int = 110, height: int = 60) -> str:
    """The panel without its colours."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")  # strict: what cannot be encoded raises
    Console(file=stream, width=width, height=height, force_terminal=True).print(RunPanel(snapshot(folder)))
    stream.flush()
    stream.seek(0)
    return re.sub(r"\x1b\[[0-9;]*m", "", stream.read())


def plain(folder: Path, during: Callable[[], object] = lambda: None) -> list[str]:
    """Lines printed where there is no terminal, of a run directory that `during` changes."""
    output = io.StringIO()
    with redirect_stdout(output), RunDisplay(RunSnapshot(folder)):
        during()
    return output.getvalue().splitlines()


def test_the_panel_answers_all_three_questions_and_a_model_cannot_steer_the_terminal(tmp_path: Path) -> None:
    write_run(tmp_path)
    shown = text_of(tmp_path)
    for part in (
        "grpo advantages, gspo loss",
        *("Is it learning?", "0.400", "exact_match 0.200", "0.125", "0.875", "0.0123"),
        *("Is the pipeline healthy?", "in_flight 12", "needs 8, has 3", "reward_timeout 3", "finished 60"),
        *("What does it write?", "it is seven", "which digit?", "\\x1b[2J"),
    ):
        assert part in shown, part
    assert "\x1b" not in shown


@pytest.mark.parametrize(("width", "height"), [(1, 24), (15, 24), (16, 24), (30, 13), (40, 15), (80, 24), (200, 60)])
def test_the_panel_fits_its_terminal_and_a_small_one_keeps_what_matters(
    tmp_path: Path, width: int, height: int
) -> None:
    recorder = write_run(tmp_path)
    if width >= 40:
        record: dict[str, Any] = {"step": 41, "loss": None, **{f"reward/component_{n}": n / 10 for n in range(12)}}
        recorder.step(record)
    lines = text_of(tmp_path, width, height).splitlines()
    if width < 16:
        return  # too narrow to say anything, and no reason to end
    assert len(lines) <= height
    assert {cell_len(line) for line in lines} == {width}
    parts = ("reward", "held-out", "WARNING", "waiting for", "errors", "it is seven", "What does it write?")
    for part in parts if width >= 40 else ("0.400",):
        assert any(part in line for line in lines), part


def test_a_run_that_starts_shows_what_each_process_does(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "learner.log").write_text(
        "2026-11-29 18:19:28 learner INFO    learner.loop: one\n"
        "2026-11-29 18:19:29 learner INFO    learner.loop: loads it\n"
    )
    (logs / "rollout_server.log").write_text("Traceback of half a line")
    shown = text_of(tmp_path)
    for part in ("learner", "loads it", "rollout_ser", "Traceback of half a line", "the learner to start"):
        assert part in shown, part
    assert "18:19" not in shown
    assert "optimisation" not in shown


def test_a_policy_that_the_critic_goes_before_has_its_reason_in_the_place_of_a_gradient(tmp_path: Path) -> None:
    recorder = write_run(tmp_path)
    reason = "not before step 61: the critic warms up"
    assert reason not in text_of(tmp_path)
    recorder.step({"step": 41, "reward/mean": 0.4, "critic/loss": 0.1})
    assert reason in text_of(tmp_path)


def test_text_in_wide_characters_is_cut_between_cells_and_what_turns_text_around_is_a_number(tmp_path: Path) -> None:
    recorder = write_run(tmp_path)
    completions = [{"text": "漢字 é \u202e\udc80 🙂", "reward": 1.0}, {"text": "字" * 300, "reward": 0.0}]
    recorder.sample({"step": 41, "prompt": "何の数字？", "answer": "七", "completions": completions}, {})
    text = text_of(tmp_path, 120, 30)
    assert {cell_len(line) for line in text.splitlines()} == {120}
    assert "漢字 é \\u202e\\udc80" in text


def test_a_damaged_status_half_a_line_and_missing_keys_do_not_end_the_panel(tmp_path: Path) -> None:
    assert "nothing yet" in text_of(tmp_path), "an empty run directory is shown, too"
    write_run(tmp_path, steps=2).status(device={"holder": "learner", "fence": 1})
    for name in ("metrics.jsonl", "evaluations.jsonl", "samples.jsonl", "status.json"):
        whole = (tmp_path / name).read_bytes()
        last = json.loads(whole.splitlines()[-1])
        for key in last:
            noise = b"" if name == "status.json" else whole + b"\xff\xfe\n"
            (tmp_path / name).write_bytes(noise + json.dumps({k: last[k] for k in last if k != key}).encode() + b"\n")
            assert "Is it learning?" in text_of(tmp_path), (name, key)
            assert "\x1b" not in "".join(plain(tmp_path)), (name, key)
        (tmp_path / name).write_bytes(whole)
    for status in (b"\xff\xfe{", b"[" * 100_000, b"[1]", b""):
        (tmp_path / "status.json").write_bytes(status)
        assert "step 2" in text_of(tmp_path)


def test_without_a_terminal_there_are_plain_lines(tmp_path: Path) -> None:
    lines = plain(tmp_path / "run", lambda: write_run(tmp_path / "run"))
    assert "\x1b" not in "".join(lines)
    assert any(line.startswith("step 40 of 100: reward 0.400") for line in lines)
    assert "step 40: held-out accuracy 0.875 over 16 rows, 1 without a score" in lines
    assert len(lines) == 3, "nothing is said twice"


def test_the_snapshot_follows_a_growing_and_a_cut_file(tmp_path: Path) -> None:
    recorder = write_run(tmp_path, steps=5)
    run = snapshot(tmp_path)
    recorder.step({"step": 6, "step_s": 2.0})
    run.refresh()
    assert [step["step"] for step in run.steps] == [1, 2, 3, 4, 5, 6]
    recorder.truncate_after(3, evaluations_after=3)
    run.refresh()
    assert [step["step"] for step in run.steps] == [1, 2, 3]
    assert (run.good["completion"]["reward"], run.bad["completion"]["reward"]) == (1.0, 0.0)
    later = RunSnapshot(tmp_path, since=time.time() + 60)
    later.refresh()
    assert later.status == {}, "of an earlier process"


def test_a_long_run_is_followed_in_little_memory(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {n}, "reward/mean": {n}}}\n' for n in range(1, 3001)))
    line = json.dumps({"step": 1, "prompt": "x" * 1000, "completions": [{"text": "y", "reward": 1.0}]}) + "\n"
    (tmp_path / "samples.jsonl").write_text(line * 5000)
    assert (len(snapshot(tmp_path).steps), len(snapshot(tmp_path).rewards)) == (512, 3000)
    assert JsonlTail(tmp_path / "samples.jsonl", newest_bytes=3000).new_records()[0] == [json.loads(line)] * 2


def steps_of(process: float, first: int, last: int, pace: float, pauses: dict[int, float] | None = None) -> list[dict]:
    """Lines of one process that began at this Unix time; its pauses come before the steps that they are named by."""
    lines, uptime = [], 10.0
    for step in range(first, last + 1):
        uptime += pace + (pauses or {}).get(step, 0.0)
        lines.append({"step": step, "time": process + uptime, "uptime_s": uptime, "step_s": pace, "publish_bytes": 9.0})
    return lines


def test_the_pace_has_evaluations_and_checkpoints_and_no_time_between_processes() -> None:
    pausing = steps_of(1000.0, 1, 101, 2.0, {26: 30.0, 51: 30.0, 76: 30.0, 101: 30.0})
    assert seconds_per_step(pausing) == pytest.approx(2.0 + 4 * 30 / 100)
    assert seconds_per_step(pausing[:3]) is None, "two intervals say little"
    again = [{**line, "publish_bytes": 0.0} for line in steps_of(90_000.0, 51, 70, 0.1)]
    assert seconds_per_step(pausing + again) == pytest.approx(3.2), "made again from the journal: no pace of a run"
    assert seconds_per_step(pausing + steps_of(90_000.0, 102, 110, 4.0)) == pytest.approx(4.0), "a slower process"


def test_the_time_left_is_said_with_the_clock(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path)
    for line in steps_of(time.time() - 10.0 - 20 * 60.0, 1, 20, 60.0):
        recorder.step(line)
    recorder.status(phase="training", total_steps=50)
    run = snapshot(tmp_path)
    assert run.seconds_left() == pytest.approx(30 * 60.0, abs=5)
    assert re.fullmatch(r"(30 min 0|29 min 5)\d s left, (\w{3} )?\d\d:\d\d", time_left(run))
    recorder.status(phase="finished")
    run.refresh()
    assert time_left(run) == "finished after 20 min 10 s"


def test_what_is_wrong_in_the_newest_steps_is_a_warning_and_no_more_once_the_run_has_ended(tmp_path: Path) -> None:
    recorder = write_run(tmp_path)
    assert snapshot(tmp_path).warnings() == {}
    for step in range(41, 52):
        recorder.step({"step": step, **STEP, "entropy": 0.01, "loss": float("nan") if step == 41 else 0.1})
    assert list(snapshot(tmp_path).warnings()) == ["Entropy collapsed"], "the loss is a number again"
    assert "Entropy collapsed: below 0.02 nats per token in steps 42 to 51" in text_of(tmp_path)
    recorder.status(servers=[])
    time.sleep(0.2)
    assert list(snapshot(tmp_path).warnings()) == ["No rollout server is connected", "Entropy collapsed"]
    recorder.status(phase="failed")
    assert snapshot(tmp_path).warnings() == {}, "nothing can be fixed"


@pytest.mark.parametrize("columns", [100, 80])
def test_a_warning_is_whole_at_usual_widths(tmp_path: Path, columns: int) -> None:
    recorder = write_run(tmp_path)
    for step in range(41, 52):
        recorder.step({"step": step, **STEP, "mismatch_kl_k3": 0.2, "staleness/mean": 1.9})
    warnings = snapshot(tmp_path).warnings()
    assert list(warnings) == ["The policy drifts from its samples"]
    shown = re.sub(r"\W+", "", text_of(tmp_path, columns))
    for message in warnings.values():
        assert re.sub(r"\W+", "", message) in shown


def test_watch_follows_a_run_of_another_process_to_its_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorder = write_run(tmp_path)
    threading.Timer(0.5, lambda: recorder.status(phase="finished")).start()
    assert main(["watch", str(tmp_path)]) == 0
    assert "step 40 of 100: reward 0.400" in capsys.readouterr().out
    (tmp_path / "status.json").write_text(json.dumps({"phase": "failed", "time": time.time() - 3600}))
    assert main(["watch", str(tmp_path)]) == 1
    assert f"train {tmp_path}/config.yaml --resume" in capsys.readouterr().out, "what has become of it, and what to do"
    assert main(["watch", str(tmp_path / "nothing")]) == 2
    assert "there is no run in" in capsys.readouterr().err


def test_watch_ends_with_who_reads_it(tmp_path: Path) -> None:
    write_run(tmp_path)
    assert run_unread(*ASYNCRL, "watch", str(tmp_path)) == (READER_GONE, ""), "rich prints it"
