"""The interface of a tracker, and the data that it gets."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from PIL import Image

LARGEST_EDGE = 512
"""Pixels of a picture that is shown; the file in images/ is as the model saw it."""


@dataclass(frozen=True)
class Sample:
    """One group: its line of samples.jsonl, and its pictures, encoded."""

    record: Mapping[str, Any]
    images: tuple[bytes, ...] = ()

    def pictures(self) -> list[Image.Image]:
        from PIL import Image

        shown = [Image.open(io.BytesIO(data)).convert("RGB") for data in self.images]
        for picture in shown:
            picture.thumbnail((LARGEST_EDGE, LARGEST_EDGE))
        return shown


@dataclass(frozen=True)
class TrackedRun:
    run_path: Path
    config: Mapping[str, Any]
    """Hyperparameters: the resolved configuration, by section."""
    resumed_after: int | None = None
    """Step that this process goes on from, if there was one before it: later steps are made again."""
    last_recorded: int = 0
    """Last step that an earlier process recorded."""
    evaluations: tuple[Mapping[str, Any], ...] = ()
    """Evaluations of steps after `resumed_after` that an earlier process recorded: they are not made again."""


class Tracker(Protocol):
    """Interface of a tracker; calls come in order from one thread, errors are counted.

    It is opened with a TrackedRun, whose hyperparameters it shows, and its settings (None without a section)."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def evaluation(self, step: int, results: Mapping[str, float]) -> None: ...
    def samples(self, step: int, samples: Sequence[Sample]) -> None: ...
    def close(self) -> None: ...


def numbers(record: Mapping[str, Any]) -> tuple[int, dict[str, float]]:
    """The step of a line, and its other numbers except the clock's."""
    values = {k: float(value) for k, value in record.items() if _is_number(value) and k not in ("step", "time")}
    return int(record["step"]), values


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (hasattr(value, "item") and getattr(value, "ndim", 0) == 0)
