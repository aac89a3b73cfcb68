"""TensorBoard's records can be read back with its own format."""

from __future__ import annotations

import io
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from asyncrl.config.run_sections import TelemetryConfig
from asyncrl.errors import UserError
from asyncrl.telemetry.recorder import RunRecorder
from asyncrl.telemetry.tracker import TrackedRun, Trackers, check_trackers, openers_of
from tests.unit.asyncrl.test_trackers import record_steps

CONFIG = {"learner": {"optim": {"lr": 1e-4}, "max_staleness": 2}, "data": {"train_files": ["a.parquet"]}}


def recorder_of(folder: Path, *names: str, errors: Counter[str] | None = None) -> RunRecorder:
    settings: dict[str, Any] = {"wandb": {"project": "digits"}} if "wandb" in names else {}
    openers = openers_of(TelemetryConfig.model_validate({"trackers": names, **settings}))
    return RunRecorder(folder, Trackers(TrackedRun(folder, CONFIG), openers, Counter() if errors is None else errors))


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
