"""Trackers cannot hurt a run."""

from __future__ import annotations

import io
import logging
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from asyncrl.config.run_sections import TelemetryConfig
from asyncrl.plugins import what_to_install
from asyncrl.telemetry.recorder import RunRecorder
from asyncrl.telemetry.tracker import TrackedRun, Tracker, Trackers


def png(colour: str) -> bytes:
    encoded = io.BytesIO()
    Image.new("RGB", (700, 350), colour).save(encoded, format="PNG")
    return encoded.getvalue()


def record_steps(recorder: RunRecorder, first: int, last: int) -> None:
    for step in range(first, last + 1):
        recorder.step({"step": step, "time": time.time(), "reward/mean": step / 10, "loss": float("nan"), "name": "x"})
        completions = [{"text": f"it | is `{step}`", "reward": 1.0, "status": "finished"}, {"text": "", "reward": None}]
        sample = {"step": step, "row_id": "rl:1", "prompt": "which?", "answer": "7", "completions": completions}
        recorder.sample(sample, {"ab" * 8: png("red"), "cd" * 8: png("blue")})


class Broken:
    """Raises at every call, or hangs."""

    def __init__(self, hangs_s: float = 0.0):
        self.hangs_s = hangs_s

    def step(self, *_: object) -> None:
        time.sleep(self.hangs_s)
        raise OSError("no route to host")

    evaluation = samples = close = step


def trackers_of(folder: Path, opener: Callable[[TrackedRun], Tracker], errors: Counter[str]) -> Trackers:
    return Trackers(TrackedRun(folder, {}), {"broken": opener}, errors)


def refuse(_: TrackedRun) -> Tracker:
    raise ValueError("wrong key")


@pytest.mark.parametrize(
    ("opener", "failures", "reason"),
    [(lambda _: Broken(), 5 + 5 + 1, "no route to host"), (refuse, 1, "ValueError: wrong key")],
    ids=["at steps, samples and close", "at opening"],
)
def test_a_tracker_that_raises_is_counted_and_the_run_goes_on(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    opener: Callable[[TrackedRun], Tracker],
    failures: int,
    reason: str,
) -> None:
    errors: Counter[str] = Counter()
    with caplog.at_level(logging.WARNING):
        recorder = RunRecorder(tmp_path, trackers_of(tmp_path, opener, errors))
        record_steps(recorder, 1, 5)
        recorder.close()
    assert errors == {"tracker_broken": failures}
    assert caplog.text.count(reason) == 1, "it is logged once"
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 5


def test_a_slow_tracker_neither_delays_the_run_nor_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.telemetry.tracker.QUEUE_LENGTH", 4)
    monkeypatch.setattr("asyncrl.telemetry.tracker.CLOSE_S", 0.2)
    errors: Counter[str] = Counter()
    trackers = trackers_of(tmp_path, lambda _: Broken(hangs_s=30), errors)
    began = time.monotonic()
    for step in range(50):
        trackers.step({"step": step})
    assert time.monotonic() - began < 0.5
    trackers.close()
    assert time.monotonic() - began < 2
    assert errors["tracker_broken"] >= 50 - 4, "what is lost is counted"


def test_a_tracker_that_nothing_has_is_refused_with_what_to_install() -> None:
    with pytest.raises(ValueError, match=r"telemetry\.trackers is 'paper', and there are ") as refused:
        TelemetryConfig(trackers=("paper",))
    assert what_to_install("trackers") in str(refused.value)
