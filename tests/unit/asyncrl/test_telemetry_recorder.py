"""The files of a run directory survive crashes, resumes and readers; writing behind the caller's back is not silent."""

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

from asyncrl.telemetry import background_writer
from asyncrl.telemetry.background_writer import MAX_WAITING, BackgroundWriter
from asyncrl.telemetry.jsonl import JsonlTail
from asyncrl.telemetry.recorder import RunRecorder, read_status
from tests.rigs.waiting import wait_until

PNG = b"\x89PNG\r\n\x1a\n" + b"pixels"


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_step_is_readable_as_soon_as_it_is_recorded_and_what_is_not_finite_is_null_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = RunRecorder(tmp_path)
    for step in (1, 2):
        values: dict[str, Any] = {"step": step, "loss": np.float32(0.5), "rows": np.int64(3), "ess": float("nan")}
        recorder.step(values)
        assert lines(tmp_path / "metrics.jsonl")[-1] == {"step": step, "loss": 0.5, "rows": 3, "ess": None}
    assert caplog.text.count("metrics.jsonl: ess is nan") == 1


def test_resuming_forgets_later_lines_of_every_file(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path)
    for step in range(1, 6):
        recorder.step({"step": step})
        recorder.evaluation({"step": step, "accuracy": 0.1})
        recorder.sample({"step": step, "images": []}, {})
    recorder.timeline([{"who": "learner", "what": "saving", "since": 1.0, "until": 2.0}])
    resumed = RunRecorder(tmp_path)
    resumed.truncate_after(3, evaluations_after=4)
    resumed.step({"step": 4, "again": 1})
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 1}, {"step": 2}, {"step": 3}, {"step": 4, "again": 1}]
    assert [line["step"] for line in lines(tmp_path / "evaluations.jsonl")] == [1, 2, 3, 4]
    assert [line["step"] for line in lines(tmp_path / "samples.jsonl")] == [1, 2, 3]
    assert len(lines(tmp_path / "timeline.jsonl")) == 1, "the time was spent"


def test_a_half_written_last_line_is_dropped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2, "lo')
    with caplog.at_level(logging.WARNING):
        RunRecorder(tmp_path).step({"step": 2})
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [1, 2]
    assert "middle of a line" in caplog.text


def test_images_are_stored_once_under_their_hash(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path)
    kinds = {".png": PNG, ".jpg": b"\xff\xd8\xffjpeg", ".webp": b"RIFF0000WEBP", ".bin": b"unknown"}
    images = {letter * 64: data for letter, data in zip("abcd", kinds.values(), strict=True)}
    recorder.sample({"step": 1, "images": list(images), "completions": [{"text": "half \udc80 é"}]}, images)
    stored = tmp_path / "images" / f"{'a' * 64}.png"
    before = stored.stat().st_mtime_ns
    recorder.sample({"step": 2, "images": ["a" * 64]}, {"a" * 64: PNG})
    assert {path.suffix: path.read_bytes() for path in (tmp_path / "images").iterdir()} == kinds
    assert stored.stat().st_mtime_ns == before
    with pytest.raises(ValueError, match="hexadecimal"):
        recorder.sample({"step": 3}, {"../../escape": PNG})
    assert lines(tmp_path / "samples.jsonl")[0]["completions"][0]["text"] == "half \udc80 é", "not valid Unicode"


def test_readers_of_the_status_never_see_a_part_and_the_newest_wins(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path)
    recorder.status(phase="start", filler="x" * 20_000)
    stop = threading.Event()
    seen: list[str] = []

    def read() -> None:
        while not stop.is_set():
            seen.append(json.loads((tmp_path / "status.json").read_text())["phase"])

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(100):
        recorder.status(phase=f"phase {number}", filler="x" * (number * 100))
    stop.set()
    reader.join(5)
    assert seen
    assert not reader.is_alive()
    for step in range(500):
        recorder.status(step=step)
    recorder.status(phase="finished")
    for _ in range(2):
        status = read_status(tmp_path)
        assert (status["phase"], status["step"]) == ("finished", 499), "no older one comes after it"
        time.sleep(0.05)
    assert status["time"] > 0
    assert not list(tmp_path.glob(".*.tmp"))


def test_a_status_that_cannot_be_written_is_not_silent(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path / "run")
    recorder.status(phase="training", step=0)
    shutil.rmtree(tmp_path / "run")

    def write() -> bool:
        recorder.status(step=1)
        return False

    with pytest.raises(OSError, match=r"status\.json"):
        wait_until(write, "the error of the write before", timeout_s=5)


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
    (line,) = done.stderr.splitlines()
    day, clock, *rest = line.split()
    assert (len(day), len(clock)) == (10, 8)
    assert rest == ["learner", "INFO", "x:", "hello"]


def test_background_work_is_done_in_order_on_another_thread() -> None:
    done: list[tuple[int, int]] = []
    writer = BackgroundWriter("test")
    for number in range(50):
        writer.do(lambda number: done.append((number, threading.get_ident())), number)
    writer.close()
    assert [number for number, _ in done] == list(range(50))
    assert threading.get_ident() not in {thread for _, thread in done}


def test_a_caller_that_is_faster_than_its_background_work_waits() -> None:
    writer, go = BackgroundWriter("test"), threading.Event()
    for _ in range(MAX_WAITING):
        writer.do(go.wait, 30)
    late = threading.Thread(target=writer.do, args=(int,))
    late.start()
    late.join(0.2)
    assert late.is_alive()
    go.set()
    late.join(10)
    assert not late.is_alive()
    writer.close()


def test_an_error_of_background_work_is_raised_by_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError(28, "No space left on device")

    writer, go = BackgroundWriter("samples"), threading.Event()
    for next_call in (writer.wait, writer.wait):
        writer.do(fail)
        with pytest.raises(OSError, match="No space"):
            next_call()
    monkeypatch.setattr(background_writer, "DEADLINE_S", 0.1)
    writer.do(go.wait, 30)
    with pytest.raises(OSError, match=r"samples could not be written within 0\.1 s"):
        writer.close()
    go.set()
