"""The files of a run directory survive crashes, resumes and readers."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.telemetry.jsonl import JsonlTail, write_atomically
from asyncrl.telemetry.recorder import RunRecorder, read_status
from tests.rigs.waiting import wait_until

PNG = b"\x89PNG\r\n\x1a\n" + b"pixels"


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_step_is_readable_as_soon_as_it_is_recorded(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path)
    values: dict[str, Any] = {"step": 1, "loss": np.float32(0.5), "rows/finished": np.int64(3)}
    recorder.step(values)
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": 0.5, "rows/finished": 3}]


def test_numbers_that_are_not_finite_become_null_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = RunRecorder(tmp_path)
    with caplog.at_level(logging.WARNING):
        for step in (1, 2):
            recorder.step({"step": step, "loss": float("nan"), "ess": np.float64("inf")})
    assert lines(tmp_path / "metrics.jsonl")[1] == {"step": 2, "loss": None, "ess": None}
    assert [record.getMessage().split(" is ")[0] for record in caplog.records] == [
        "metrics.jsonl: loss",
        "metrics.jsonl: ess",
    ]


def test_resuming_forgets_later_lines_of_every_file(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path)
    for step in range(1, 6):
        recorder.step({"step": step})
        recorder.evaluation({"step": step, "accuracy": 0.1})
        recorder.sample({"step": step, "images": []}, {})
    resumed = RunRecorder(tmp_path)
    resumed.truncate_after(3, evaluations_after=3)
    resumed.step({"step": 4, "again": 1})
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]
    assert lines(tmp_path / "metrics.jsonl")[-1] == {"step": 4, "again": 1}
    for name in ("evaluations.jsonl", "samples.jsonl"):
        assert [line["step"] for line in lines(tmp_path / name)] == [1, 2, 3]


def test_a_half_written_last_line_is_dropped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2, "lo')
    with caplog.at_level(logging.WARNING):
        recorder = RunRecorder(tmp_path)
    recorder.step({"step": 2})
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [1, 2]
    assert "middle of a line" in caplog.text


def test_images_are_stored_once_under_their_hash(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path)
    images = {
        "a" * 64: PNG,
        "b" * 64: b"\xff\xd8\xffjpeg",
        "c" * 64: b"RIFF0000WEBP",
        "d" * 64: b"unknown",
    }
    recorder.sample({"step": 1, "images": list(images)}, images)
    stored = tmp_path / "images" / f"{'a' * 64}.png"
    before = stored.stat().st_mtime_ns
    recorder.sample({"step": 2, "images": ["a" * 64]}, {"a" * 64: PNG})
    assert {path.suffix for path in (tmp_path / "images").iterdir()} == {".png", ".jpg", ".webp", ".bin"}
    assert stored.read_bytes() == PNG
    assert stored.stat().st_mtime_ns == before
    with pytest.raises(ValueError, match="hexadecimal"):
        recorder.sample({"step": 3}, {"../../escape": PNG})


def test_text_that_is_not_valid_unicode_stays_readable(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path)
    recorder.sample({"step": 1, "completions": [{"text": "half \udc80 é"}]}, {})
    assert lines(tmp_path / "samples.jsonl")[0]["completions"][0]["text"] == "half \udc80 é"


def test_readers_of_the_status_never_see_a_part(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path)
    recorder.status(phase="start", filler="x" * 20_000)
    stop = threading.Event()
    seen: list[str] = []

    def read() -> None:
        while not stop.is_set():
            seen.append(json.loads((tmp_path / "status.json").read_text())["phase"])

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(200):
        recorder.status(phase=f"phase {number}", filler="x" * (number * 100))
    stop.set()
    reader.join(5)
    assert seen
    assert not reader.is_alive()
    assert not list(tmp_path.glob(".*.tmp"))


def test_the_status_keeps_what_was_said_before(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path)
    recorder.status(phase="training", step=3)
    assert read_status(tmp_path)["step"] == 3
    recorder.status(step=4)
    wait_until(lambda: read_status(tmp_path)["step"] == 4, "the newest status", timeout_s=5)
    status = read_status(tmp_path)
    assert status["phase"] == "training"
    assert status["time"] > 0


def test_the_newest_status_wins_however_fast_they_come(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path)
    for step in range(500):
        recorder.status(phase="training", step=step)
    recorder.status(phase="finished")
    assert read_status(tmp_path)["phase"] == "finished"
    time.sleep(0.05)
    assert (read_status(tmp_path)["phase"], read_status(tmp_path)["step"]) == ("finished", 499), "no older one after it"


def test_a_status_that_cannot_be_written_is_not_silent(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path / "run")
    recorder.status(phase="training", step=0)
    shutil.rmtree(tmp_path / "run")

    def say() -> bool:
        recorder.status(step=1)
        return False

    with pytest.raises(OSError, match=r"status\.json"):
        wait_until(say, "the error of the write before", timeout_s=5)


def test_a_failed_write_leaves_the_old_content(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")
    with pytest.raises(TypeError):
        write_atomically(path, "not bytes")  # pyright: ignore[reportArgumentType]
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_a_tail_hands_out_each_finished_line_once_and_notices_a_cut(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = JsonlTail(path)
    assert tail.new_records() == ([], False)
    path.write_text('{"step": 1}\n{"st')
    assert tail.new_records() == ([{"step": 1}], False)
    with path.open("a") as file:
        file.write('ep": 2}\nnot json\n{"step": 3}\n')
    assert tail.new_records() == ([{"step": 2}, {"step": 3}], False)
    assert tail.new_records() == ([], False)
    RunRecorder(tmp_path).truncate_after(1, evaluations_after=1)
    assert tail.new_records() == ([{"step": 1}], True)


def test_a_log_line_has_time_service_and_level() -> None:
    code = (
        "import logging\nfrom asyncrl.telemetry.logs import configure_logging\n"
        "configure_logging('learner', 'INFO')\nlogging.getLogger('x').info('hello')\n"
        "logging.getLogger('x').debug('hidden')\nlogging.getLogger('urllib3').info('chatter')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20)
    assert done.returncode == 0, done.stderr
    (line,) = done.stderr.splitlines()
    day, clock, service, level, name, message = line.split()
    assert (len(day), len(clock)) == (10, 8)
    assert (service, level, name, message) == ("learner", "INFO", "x:", "hello")
