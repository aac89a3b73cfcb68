"""TensorBoard: event files in `<run_dir>/tensorboard`, written without torch or TensorFlow."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml
from PIL import Image
from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from asyncrl.telemetry.trackers.tracker import Sample, TrackedRun, numbers

FOLDER = "tensorboard"
FLUSH_S = 10
COLUMNS = ("reward", "status", "completion")


class TensorBoardTracker:
    def __init__(self, run: TrackedRun):
        self._writer = EventFileWriter(str(run.run_path / FOLDER), flush_secs=FLUSH_S)
        if run.resumed_after is not None:
            # TensorBoard forgets this step and later ones of the files before this one: they are made again.
            self._event(run.resumed_after + 1, session_log=SessionLog(status=SessionLog.START))
            for evaluation in run.evaluations:
                self.evaluation(*numbers(evaluation))
        self._event(
            0, summary=text_pb("configuration", _fenced(str(yaml.safe_dump(dict(run.config), sort_keys=False))))
        )
        self._event(0, summary=hparams_pb(dict(_flat(run.config))))

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._scalars(step, metrics)

    def evaluation(self, step: int, results: Mapping[str, float]) -> None:
        self._scalars(step, {f"held_out/{name}": value for name, value in results.items()})

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        for number, sample in enumerate(samples):
            self._event(step, summary=text_pb(f"samples/{number}", _table(sample)))
            pictures = [_picture(f"samples/{number}/{place}", shown) for place, shown in enumerate(sample.pictures())]
            self._event(step, summary=Summary(value=pictures))

    def close(self) -> None:
        self._writer.close()

    def _scalars(self, step: int, values: Mapping[str, float]) -> None:
        shown = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._event(step, summary=Summary(value=shown))

    def _event(self, step: int, **content: Any) -> None:
        self._writer.add_event(Event(wall_time=time.time(), step=step, **content))


def _picture(tag: str, picture: Image.Image) -> Summary.Value:
    encoded = io.BytesIO()
    picture.save(encoded, format="PNG")
    image = Summary.Image(
        height=picture.height, width=picture.width, colorspace=3, encoded_image_string=encoded.getvalue()
    )
    return Summary.Value(tag=tag, image=image)


def _table(sample: Sample) -> str:
    """Markdown. Model text is code, so that it formats nothing."""
    record = sample.record
    lines = [
        f"**prompt** {_code(record.get('prompt'))} **answer** {_code(record.get('answer'))}",
        "",
        f"| {' | '.join(COLUMNS)} |",
        "|---" * len(COLUMNS) + "|",
    ]
    for completion in record.get("completions", ()):
        reward = completion.get("reward")
        shown = "-" if reward is None else f"{reward:.3f}"
        lines.append(f"| {shown} | {completion.get('status', '')} | {_code(completion.get('text'))} |")
    return "\n".join(lines)


def _code(text: Any) -> str:
    line = " ".join(str(text or "").split()).replace("`", "'").replace("|", "\\|")
    return f"`{line}`" if line else ""


def _fenced(text: str) -> str:
    return f"```yaml\n{text}```"


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """`section.key` and its value, lists as text."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value if isinstance(value, bool | int | float | str) else str(value)
