"""Files of a run directory that a learner writes for readers: metrics, evaluations, samples, timeline, status."""

from __future__ import annotations

import json
import logging
import math
import re
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from asyncrl.telemetry.jsonl import JsonlTail, drop_unfinished_line, keep_steps, write_atomically
from asyncrl.telemetry.tracker import Trackers

MAX_WAITING = 8
"""Pieces of work that may wait; then the caller waits, so that memory is bounded."""
DEADLINE_S = 120.0


class BackgroundWriter:
    """Does work in order on one thread, for one calling thread. Errors are raised by the caller's next call."""

    def __init__(self, name: str):
        self._name = name
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._waiting: deque[Future[Any]] = deque()

    def do(self, work: Callable[..., Any], *arguments: Any) -> None:
        self._waiting.append(self._pool.submit(work, *arguments))
        while self._waiting and (self._waiting[0].done() or len(self._waiting) > MAX_WAITING):
            self._finish_first()

    def wait(self) -> None:
        """Block until all work is done."""
        while self._waiting:
            self._finish_first()

    def _finish_first(self) -> None:
        try:
            self._waiting.popleft().result(DEADLINE_S)
        except TimeoutError as error:
            raise OSError(f"{self._name} could not be written within {DEADLINE_S:g} s: is the disk there?") from error

    def close(self) -> None:
        try:
            self.wait()
        finally:
            self._pool.shutdown(wait=False, cancel_futures=True)


logger = logging.getLogger(__name__)

CONFIG_FILE = "config.yaml"
"""The resolved configuration, as the learner accepted it."""
METRICS_FILE = "metrics.jsonl"
EVALUATIONS_FILE = "evaluations.jsonl"
SAMPLES_FILE = "samples.jsonl"
STATUS_FILE = "status.json"
TIMELINE_FILE = "timeline.jsonl"
BAD_ROWS_FILE = "bad_rows.jsonl"
"""Rows that the run leaves out, and why."""
IMAGES_FOLDER = "images"


class RunRecorder:
    """Appends to the run's JSONL files. One writer per run directory (the learner); any number of readers.

    Every line is flushed to the system at once, so a killed process loses none of them.
    """

    def __init__(self, run_path: Path, trackers: Trackers | None = None):
        self.run_path = run_path
        self._trackers = trackers
        self.run_path.mkdir(parents=True, exist_ok=True)
        self._status: dict[str, Any] = {}
        self._status_writer = BackgroundWriter(STATUS_FILE)
        self._warned: set[str] = set()
        for name in (METRICS_FILE, EVALUATIONS_FILE, SAMPLES_FILE, TIMELINE_FILE):
            drop_unfinished_line(self.run_path / name)

    def step(self, metrics: Mapping[str, float]) -> None:
        """One line of metrics.jsonl; must contain `step`. Numbers that are not finite become null, with a warning."""
        self._append(METRICS_FILE, metrics)
        if self._trackers:
            self._trackers.step(metrics)

    def evaluation(self, evaluation: Mapping[str, Any]) -> None:
        """One line of evaluations.jsonl; must contain `step`."""
        self._append(EVALUATIONS_FILE, evaluation)
        if self._trackers:
            self._trackers.evaluation(evaluation)

    def sample(self, sample: Mapping[str, Any], images: Mapping[str, bytes]) -> None:
        """One line of samples.jsonl; must contain `step`. Images (encoded bytes by hash) are stored once."""
        for image_hash, data in images.items():
            self._store_image(image_hash, data)
        self._append(SAMPLES_FILE, sample)
        if self._trackers:
            self._trackers.sample(sample, images)

    def bad_rows(self, rows: Sequence[Mapping[str, str]]) -> None:
        """Replace bad_rows.jsonl: source, row and reason of each row that is left out. No file where there are none."""
        file = self.run_path / BAD_ROWS_FILE
        if rows:
            write_atomically(file, b"".join(self._encoded(BAD_ROWS_FILE, row) + b"\n" for row in rows))
        else:
            file.unlink(missing_ok=True)

    def timeline(self, spans: Sequence[Mapping[str, Any]]) -> None:
        """Append lines of timeline.jsonl. A resumed run keeps them all: the time was spent."""
        self._append(TIMELINE_FILE, *spans)

    def status(self, **fields: Any) -> None:
        """Replace these fields of status.json; the others keep the values that this process gave them last.

        A new phase is in the file on return, everything else a moment later.
        """
        before = self._status.get("phase")
        self._status.update(fields, time=time.time())
        data = self._encoded(STATUS_FILE, self._status)
        self._status_writer.do(partial(write_atomically, self.run_path / STATUS_FILE, data, durable=False))
        if self._status.get("phase") != before:
            self._status_writer.wait()

    def truncate_after(self, step: int, *, evaluations_after: int) -> None:
        """Cut back what was written past the step that a run resumes from. Images stay: they are named by content.

        Steps up to `evaluations_after` will be made again, exactly; their evaluations need not.
        """
        last_recorded = max((int(line["step"]) for line in self._lines(METRICS_FILE)), default=0)
        for name, last in ((METRICS_FILE, step), (SAMPLES_FILE, step), (EVALUATIONS_FILE, evaluations_after)):
            dropped = keep_steps(self.run_path / name, last)
            if dropped:
                logger.info("resuming after step %d: dropped %d later lines of %s", last, dropped, name)
        if self._trackers:
            later = [evaluation for evaluation in self.evaluations() if evaluation["step"] > step]
            self._trackers.resume(step, last_recorded, later)

    def evaluations(self) -> list[dict[str, Any]]:
        """Recorded evaluations, in the order in which they were made."""
        return self._lines(EVALUATIONS_FILE)

    def close(self) -> None:
        """Let trackers write what they have, for a limited time."""
        if self._trackers:
            self._trackers.close()

    def _lines(self, name: str) -> list[dict[str, Any]]:
        """Lines with a step."""
        return [line for line in JsonlTail(self.run_path / name).new_records()[0] if "step" in line]

    def _append(self, name: str, *records: Mapping[str, Any]) -> None:
        lines = b"".join(self._encoded(name, record) + b"\n" for record in records)
        with (self.run_path / name).open("ab") as file:
            file.write(lines)

    def _encoded(self, name: str, record: Mapping[str, Any]) -> bytes:
        return json.dumps(self._finite(name, record), ensure_ascii=False).encode(errors="backslashreplace")

    def _finite(self, name: str, value: Any, key: str = "") -> Any:
        """Value with plain Python numbers, and None where a number is not finite."""
        if isinstance(value, Mapping):
            return {str(k): self._finite(name, v, f"{key}.{k}" if key else str(k)) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self._finite(name, item, key) for item in value]
        if hasattr(value, "item") and getattr(value, "ndim", 0) == 0:  # numpy scalars
            value = value.item()
        if isinstance(value, float) and not math.isfinite(value):
            warning = f"{name}: {key}"
            if warning not in self._warned:
                self._warned.add(warning)
                logger.warning("%s is %s; written as null (logged once)", warning, value)
            return None
        return value

    def _store_image(self, image_hash: str, data: bytes) -> None:
        if not re.fullmatch(r"[0-9a-f]{8,128}", image_hash):
            raise ValueError(f"an image hash should be hexadecimal, not {image_hash!r}")
        folder = self.run_path / IMAGES_FOLDER
        path = folder / f"{image_hash}.{image_extension(data)}"
        if not path.exists():
            folder.mkdir(exist_ok=True)
            write_atomically(path, data, durable=False)


def read_status(run_dir: Path) -> dict[str, Any]:
    """The newest content of status.json; empty before the first, and where the file cannot be read."""
    try:
        status = json.loads((run_dir / STATUS_FILE).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return status if isinstance(status, dict) else {}


def is_finished(run_dir: Path) -> bool:
    """True if the run's last phase is `finished`."""
    return read_status(run_dir).get("phase") == "finished"


def image_extension(data: bytes) -> str:
    """File ending by the first bytes: png, jpg, webp, or bin for everything else."""
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "png"
    if data.startswith(b"\xff\xd8\xff"):
        return "jpg"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "webp"
    return "bin"
