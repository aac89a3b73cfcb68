"""Trackers beside a run: each on a thread of its own, which the run neither waits for nor fails with."""

from __future__ import annotations

import importlib.util
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from asyncrl.errors import UserError
from asyncrl.telemetry.trackers.base import Sample, TrackedRun, Tracker, numbers

if TYPE_CHECKING:
    from asyncrl.config.schema import RunConfig, TelemetryConfig

logger = logging.getLogger(__name__)

QUEUE_LENGTH = 256
"""Calls that a slow tracker may be behind; further ones are lost, and counted."""
CLOSE_S = 10.0
"""For all trackers together. A launcher that stops a run waits a little longer (asyncrl.entry.ENDING_S more)."""

Call = Callable[[Tracker], None]


def _tensorboard(run: TrackedRun) -> Tracker:
    from asyncrl.telemetry.trackers.tensorboard_events import TensorBoardTracker

    return TensorBoardTracker(run)


def _wandb(run: TrackedRun) -> Tracker:
    from asyncrl.telemetry.trackers.weights_and_biases import WandbTracker

    return WandbTracker(run, finish_s=CLOSE_S)


OPENERS: dict[str, Callable[[TrackedRun], Tracker]] = {"tensorboard": _tensorboard, "wandb": _wandb}
"""Name, which is also that of the package and of the extra -> how it is opened."""


def check_trackers(telemetry: TelemetryConfig) -> None:
    """Raises UserError for one whose package is not here. Imports none of them: they take seconds."""
    for name in telemetry.trackers:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:  # a mere folder: W&B makes one called `wandb` where it is started
            raise UserError(
                f"telemetry.trackers names {name}, and the package {name} is not installed here. Run: "
                f"pip install 'asyncrl[{name}]', or take {name} out of telemetry.trackers"
            )


def open_trackers(config: RunConfig, errors: Counter[str]) -> Trackers:
    """Those of telemetry.trackers. Their errors are counted by kind in `errors`, as `tracker_<name>`."""
    telemetry = config.telemetry
    run = TrackedRun(config.run_path, telemetry.project, config.model_dump(mode="json"))
    openers = {name: OPENERS[name] for name in telemetry.trackers}
    return Trackers(run, openers, errors, samples_every_steps=telemetry.samples_every_steps)


class Trackers:
    """Opens them at the first word, so that it is known by then whether a run is resumed."""

    def __init__(
        self,
        run: TrackedRun,
        openers: Mapping[str, Callable[[TrackedRun], Tracker]],
        errors: Counter[str],
        *,
        samples_every_steps: int = 1,
    ):
        self._run = run
        self._openers = openers
        self._errors = errors
        self._samples_every_steps = samples_every_steps
        self._workers: list[_Worker] | None = None
        self._samples: list[Sample] = []

    def resume(self, after: int, told: int, evaluations: Sequence[Mapping[str, Any]]) -> None:
        """Before anything else; the arguments are those of TrackedRun."""
        self._run = replace(self._run, resumed_after=after, told=told, evaluations=tuple(evaluations))

    def step(self, record: Mapping[str, Any]) -> None:
        self._pass_samples_on()
        step, metrics = numbers(record)
        self._call(lambda tracker: tracker.step(step, metrics))

    def evaluation(self, record: Mapping[str, Any]) -> None:
        step, results = numbers(record)
        self._call(lambda tracker: tracker.evaluation(step, results))

    def sample(self, record: Mapping[str, Any], images: Mapping[str, bytes]) -> None:
        """Those of one step are shown together, as soon as the next begins."""
        if self._openers and record["step"] % self._samples_every_steps == 0:
            self._samples.append(Sample(record, tuple(images.values())))

    def _pass_samples_on(self) -> None:
        samples, self._samples = self._samples, []
        if samples:
            self._call(lambda tracker: tracker.samples(samples[0].record["step"], samples))

    def _call(self, call: Call) -> None:
        if self._workers is None:
            self._workers = [_Worker(name, self._run, opener, self._errors) for name, opener in self._openers.items()]
        for worker in self._workers:
            worker.put(call)

    def close(self) -> None:
        """Let them write what they have, for a while."""
        self._pass_samples_on()
        deadline = time.monotonic() + CLOSE_S
        for worker in self._workers or ():
            worker.finish()
        for worker in self._workers or ():
            worker.join(deadline)


class _Worker:
    def __init__(self, name: str, run: TrackedRun, opener: Callable[[TrackedRun], Tracker], errors: Counter[str]):
        self._name = name
        self._run = run
        self._opener = opener
        self._errors = errors
        self._is_told = False
        self._queue: queue.Queue[Call | None] = queue.Queue(QUEUE_LENGTH)
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def put(self, call: Call | None) -> None:
        try:
            self._queue.put_nowait(call)
        except queue.Full:
            self._failed(f"it is {QUEUE_LENGTH} calls behind")

    def finish(self) -> None:
        """Without waiting: one that is so far behind will not be done in time either."""
        self.put(None)

    def join(self, deadline: float) -> None:
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._failed(f"it was not done {CLOSE_S:g} s after the end")

    def _work(self) -> None:
        # A tracker is somebody else's program, often with a network behind it: whatever it raises is counted and told,
        # and no reason to stop training.
        try:
            tracker = self._opener(self._run)
        except Exception as error:
            self._failed(f"it could not be opened: {type(error).__name__}: {error}")
            return
        while (call := self._queue.get()) is not None:
            self._attempt(call, tracker)
        self._attempt(lambda tracker: tracker.close(), tracker)

    def _attempt(self, call: Call, tracker: Tracker) -> None:
        try:
            call(tracker)
        except Exception as error:
            self._failed(f"{type(error).__name__}: {error}")

    def _failed(self, why: str) -> None:
        self._errors[f"tracker_{self._name}"] += 1
        if not self._is_told:
            self._is_told = True
            logger.warning("%s misses something of this run, which goes on: %s (said once)", self._name, why)
