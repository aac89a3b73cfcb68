"""TensorBoard's and W&B's records can be read back with their own formats, and neither can hurt a run."""

from __future__ import annotations

import io
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from asyncrl.config.run_sections import TelemetryConfig
from asyncrl.errors import UserError
from asyncrl.telemetry.recorder import RunRecorder
from asyncrl.telemetry.trackers import OPENERS, TrackedRun, Tracker, Trackers, check_trackers

CONFIG = {"learner": {"optim": {"lr": 1e-4}, "max_staleness": 2}, "data": {"train_files": ["a.parquet"]}}


def png(colour: str) -> bytes:
    encoded = io.BytesIO()
    Image.new("RGB", (700, 350), colour).save(encoded, format="PNG")
    return encoded.getvalue()


def recorder_of(folder: Path, *names: str, errors: Counter[str] | None = None) -> RunRecorder:
    run = TrackedRun(folder, "digits", CONFIG)
    return RunRecorder(
        folder, Trackers(run, {name: OPENERS[name] for name in names}, Counter() if errors is None else errors)
    )


def record_steps(recorder: RunRecorder, first: int, last: int) -> None:
    for step in range(first, last + 1):
        recorder.step({"step": step, "time": time.time(), "reward/mean": step / 10, "loss": float("nan"), "name": "x"})
        completions = [{"text": f"it | is `{step}`", "reward": 1.0, "status": "finished"}, {"text": "", "reward": None}]
        sample = {"step": step, "row_id": "rl:1", "prompt": "which?", "answer": "7", "completions": completions}
        recorder.sample(sample, {"ab" * 8: png("red"), "cd" * 8: png("blue")})


def read_events(folder: Path) -> Any:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    accumulator = accumulators.EventAccumulator(str(folder / "tensorboard"), size_guidance={"images": 0, "tensors": 0})
    return accumulator.Reload()


def test_tensorboard_shows_each_step_once_over_a_resume(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    errors: Counter[str] = Counter()
    recorder = recorder_of(tmp_path, "tensorboard", errors=errors)
    record_steps(recorder, 1, 3)
    recorder.evaluation({"step": 3, "accuracy": 0.25, "rows": 16})
    recorder.close()
    time.sleep(1.1)  # event files are ordered by the second
    resumed = recorder_of(tmp_path, "tensorboard", errors=errors)
    resumed.truncate_after(1, evaluations_after=3)
    record_steps(resumed, 2, 4)
    resumed.close()
    events = read_events(tmp_path)
    assert errors == {}
    curve = [(e.step, round(e.value, 6)) for e in events.Scalars("reward/mean")]
    assert curve == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4)]
    assert [(e.step, e.value) for e in events.Scalars("held_out/accuracy")] == [(3, 0.25)], "it is not made again"
    assert "time" not in events.Tags()["scalars"]
    (text, *_) = events.Tensors("samples/0")
    shown = text.tensor_proto.string_val[0].decode()
    assert "| 1.000 | finished | `it \\| is '1'` |" in shown, "model text formats nothing"
    images = events.Images("samples/0/1")
    assert [image.step for image in images] == [1, 2, 3, 4]
    assert (images[0].width, images[0].height) == (512, 256), "large pictures are made smaller"
    assert Image.open(io.BytesIO(images[0].encoded_image_string)).convert("RGB").getpixel((0, 0)) == (0, 0, 255)
    assert "max_staleness: 2" in events.Tensors("configuration")[0].tensor_proto.string_val[0].decode()


class Broken:
    """Raises at every call, or hangs."""

    def __init__(self, hangs_s: float = 0.0):
        self.hangs_s = hangs_s

    def step(self, *_: object) -> None:
        time.sleep(self.hangs_s)
        raise OSError("no route to host")

    evaluation = samples = close = step


def trackers_of(folder: Path, opener: Callable[[TrackedRun], Tracker], errors: Counter[str]) -> Trackers:
    return Trackers(TrackedRun(folder, "p", {}), {"broken": opener}, errors)


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
    monkeypatch.setattr("asyncrl.telemetry.trackers.threads.QUEUE_LENGTH", 4)
    monkeypatch.setattr("asyncrl.telemetry.trackers.threads.CLOSE_S", 0.2)
    errors: Counter[str] = Counter()
    trackers = trackers_of(tmp_path, lambda _: Broken(hangs_s=30), errors)
    began = time.monotonic()
    for step in range(50):
        trackers.step({"step": step})
    assert time.monotonic() - began < 0.5
    trackers.close()
    assert time.monotonic() - began < 2
    assert errors["tracker_broken"] >= 50 - 4, "what is lost is counted"


def test_a_missing_package_is_refused_with_the_line_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "wandb").mkdir()  # W&B's own folder of an earlier run: importable, and not the package
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(UserError, match=r"pip install 'asyncrl\[wandb\]'"):
        check_trackers(TelemetryConfig(trackers=("wandb",)))
    check_trackers(TelemetryConfig())
