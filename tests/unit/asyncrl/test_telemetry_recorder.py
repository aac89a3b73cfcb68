"""The files of a run directory survive crashes, resumes and readers; writing behind the caller's back is not silent."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.telemetry import recorder as module
from asyncrl.telemetry.jsonl import JsonlTail, read_lines
from asyncrl.telemetry.recorder import MAX_WAITING, BackgroundWriter, RunRecorder, read_status

PNG = b"\x89PNG\r\n\x1a\n" + b"pixels"


def test_a_step_is_readable_as_soon_as_it_is_recorded_and_what_is_not_finite_is_null_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1, "lo')  # a crash in the middle of a write
    recorder = RunRecorder(tmp_path)
    for step in (1, 2):
        values: dict[str, Any] = {"step": step, "loss": np.float32(0.5), "rows": np.int64(3), "ess": float("nan")}
        recorder.step(values)
        assert read_lines(tmp_path / "metrics.jsonl")[-1] == {"step": step, "loss": 0.5, "rows": 3, "ess": None}
    assert caplog.text.count("metrics.jsonl: ess is nan") == 1
    assert caplog.text.count("ended in the middle of a line") == 1
    assert [line["step"] for line in read_lines(tmp_path / "metrics.jsonl")] == [0, 1, 2]


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
    assert read_lines(tmp_path / "metrics.jsonl") == [{"step": 1}, {"step": 2}, {"step": 3}, {"step": 4, "again": 1}]
    assert [line["step"] for line in read_lines(tmp_path / "evaluations.jsonl")] == [1, 2, 3, 4]
    assert [line["step"] for line in read_lines(tmp_path / "samples.jsonl")] == [1, 2, 3]
    assert len(read_lines(tmp_path / "timeline.jsonl")) == 1, "the time was spent"


def test_images_are_stored_once_under_their_hash(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path)
    kinds = {".png": PNG, ".jpg": b"\xff\xd8\xffjpeg", ".webp": b"RIFF0000WEBP", ".bin": b"unknown"}
    images = {letter * 64: data for letter, data in zip("abcd", kinds.values(), strict=True)}
    text = "half \udc80 é, and \u2028, which ends lines elsewhere"
    recorder.sample({"step": 1, "images": list(images), "completions": [{"text": text}]}, images)
    stored = tmp_path / "images" / f"{'a' * 64}.png"
    before = stored.stat().st_mtime_ns
    recorder.sample({"step": 2, "images": ["a" * 64]}, {"a" * 64: PNG})
    assert {path.suffix: path.read_bytes() for path in (tmp_path / "images").iterdir()} == kinds
    assert stored.stat().st_mtime_ns == before
    with pytest.raises(ValueError, match="hexadecimal"):
        recorder.sample({"step": 3}, {"../../escape": PNG})
    assert read_lines(tmp_path / "samples.jsonl")[0]["completions"][0]["text"] == text, "not valid Unicode"


def test_readers_of_the_status_never_see_a_part_and_the_newest_wins(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path)
    for step in range(300):
        recorder.status(phase=f"phase {step // 3}", step=step, filler="x" * (step * 100))
        if step % 3 == 0:
            assert json.loads((tmp_path / "status.json").read_text())["step"] == step, "a new phase is there at once"
        assert read_status(tmp_path), "whole at any time"
    recorder.status(phase="finished")
    for _ in range(2):
        status = read_status(tmp_path)
        assert (status["phase"], status["step"]) == ("finished", 299), "no older one comes after it"
        time.sleep(0.05)
    assert not list(tmp_path.glob(".*.tmp"))


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


def test_background_work_is_done_in_order_and_a_faster_caller_waits() -> None:
    writer, go = BackgroundWriter("test"), threading.Event()
    done: list[int] = []
    for number in range(MAX_WAITING):
        writer.do(lambda number: go.wait(30) and done.append(number), number)
    late = threading.Thread(target=writer.do, args=(done.append, MAX_WAITING))
    late.start()
    late.join(0.2)
    assert late.is_alive()
    go.set()
    late.join(10)
    writer.close()
    assert done == list(range(MAX_WAITING + 1))


def test_an_error_of_background_work_is_raised_by_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError(28, "No space left on device")

    writer, go = BackgroundWriter("samples"), threading.Event()
    for _ in range(2):
        with pytest.raises(OSError, match="No space"):  # noqa: PT012 by the call itself, or the next one
            writer.do(fail)
            writer.wait()
    monkeypatch.setattr(module, "DEADLINE_S", 0.1)
    writer.do(go.wait, 30)
    with pytest.raises(OSError, match=r"samples could not be written within 0\.1 s"):
        writer.close()
    go.set()
