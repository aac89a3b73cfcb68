"""What `asyncrl watch` and `asyncrl learn --unattended` say of runs that have ended, or whose files are damaged."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.cli import main
from asyncrl.config.load import dump_config
from asyncrl.config.schema import RunConfig
from asyncrl.launch.processes import JOURNAL_FILE
from asyncrl.telemetry.recorder import RunRecorder
from asyncrl.tools.panel.run_snapshot import RunSnapshot
from tests.tools.test_panel import text_of, write_run

STEPS = [
    {"step": 1, "time": 1000.0, "uptime_s": 100.0},
    {"step": 2, "time": 1060.0, "uptime_s": 160.0},
    {"step": 3, "time": 9030.0, "uptime_s": 30.0},  # another process, much later
]


def test_a_finished_run_says_how_long_it_took(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in STEPS))
    (tmp_path / "status.json").write_text(json.dumps({"phase": "finished", "total_steps": 3, "time": 9060.0}))
    assert main(["watch", str(tmp_path)]) == 0
    assert "finished after 3 min 40 s" in capsys.readouterr().out
    assert "finished after 3 min 40 s" in text_of(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 3}\n')
    assert main(["watch", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "rollout -, finished\n" in said
    assert "unknown" not in said


@pytest.mark.parametrize("status", [b"\xff\xfe{", b"[" * 100_000, b"[1]", b"", b'{"phase": 3, "time": "x"}'])
def test_a_damaged_status_does_not_end_the_panel(tmp_path: Path, status: bytes) -> None:
    write_run(tmp_path)
    (tmp_path / "status.json").write_bytes(status)
    assert "step 40" in text_of(tmp_path)


GARBAGE: list[Any] = [None, "x", [], [1], {}, {"a": 1}, -1, 10**400, 1e308, float("nan"), True, "\x1b[2J"]


def test_whatever_is_in_the_files_is_survived(tmp_path: Path) -> None:
    """Each value of each file in turn is of another type, beside lines that are no JSON."""
    write_run(tmp_path).status(device={"holder": "learner", "fence": 1})
    rng = random.Random(0)
    for name in ("metrics.jsonl", "evaluations.jsonl", "samples.jsonl", "status.json"):
        whole = (tmp_path / name).read_bytes()
        last = json.loads(whole.splitlines()[-1])
        for key in last:
            for value in (rng.choice(GARBAGE) for _ in range(3)):
                noise = b"" if name == "status.json" else whole + b"\xff\xfe\n" + b"[" * 50_000 + b"\n"
                (tmp_path / name).write_bytes(noise + json.dumps({**last, key: value}).encode() + b"\n")
                assert "Is it learning?" in text_of(tmp_path), (name, key, value)
        (tmp_path / name).write_bytes(whole)


def test_time_is_counted_anew_where_the_file_is_cut_back(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps(step) + "\n" for step in STEPS))
    story = RunSnapshot(tmp_path)
    story.refresh()
    assert story.seconds_taken() == 160 + 30
    file.write_text(json.dumps(STEPS[0]) + "\n")
    story.refresh()
    assert story.seconds_taken() == 100


def test_a_finished_run_with_more_steps_to_make_is_continued_by_hand(
    make_config: Callable[..., RunConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(trainer={"max_steps": 9})
    file = tmp_path / "run.yaml"
    file.write_text(dump_config(config))
    config.run_path.mkdir()
    (config.run_path / JOURNAL_FILE).touch()
    RunRecorder(config.run_path).status(phase="finished", step=9, total_steps=9, time=time.time())
    assert main(["learn", str(file), "--unattended"]) == 0
    assert capsys.readouterr().out == f"the run in {config.run_dir} is finished\n"
    assert main(["learn", str(file), "--unattended", "trainer.max_steps=12"]) == 0
    assert capsys.readouterr().out == (
        f"the run in {config.run_dir} is finished, at step 9, and trainer.max_steps is 12. To continue it: "
        f"asyncrl learn {file} --resume, with the same settings\n"
    )
    assert main(["learn", str(file), "--unattended", "--resume"]) == 2
    assert "--unattended decides by itself" in capsys.readouterr().err
