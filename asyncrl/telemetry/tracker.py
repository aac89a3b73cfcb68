"""The interface of a tracker, the data that it gets, and a thread for each, so that a slow service delays no step."""

from __future__ import annotations

import inspect
import io
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from asyncrl.errors import UserError
from asyncrl.plugins import description, implementation, installed
from asyncrl.telemetry.host_versions import installed_version
from asyncrl.user_functions import UserFunction, load, locate, one_line, source_fingerprint

if TYPE_CHECKING:
    from PIL import Image

    from asyncrl.config.run_sections import TelemetryConfig


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
    values = {k: float(v) for k, v in record.items() if isinstance(v, int | float) or getattr(v, "ndim", 1) == 0}
    return int(record["step"]), {name: value for name, value in values.items() if name not in ("step", "time")}


logger = logging.getLogger(__name__)

QUEUE_LENGTH = 256
"""Calls that a slow tracker may be behind; further ones are lost, and counted."""
SAMPLES_EVERY_STEPS = 20
"""Steps between those whose samples trackers show with their images; samples.jsonl has those of all steps."""
CLOSE_S = 10.0
"""Seconds to close all trackers. A launcher that stops a run waits ENDING_S (asyncrl.process_end) longer."""

METHODS = {"__init__": 3, "step": 3, "evaluation": 3, "samples": 3, "close": 1}
"""Methods of a tracker's class, and the number of their arguments, `self` among them."""
Call = Callable[[Tracker], None]
Opener = Callable[[TrackedRun], Tracker]


def own_tracker(name: str) -> UserFunction | None:
    """The user's own class of this name in telemetry.trackers; None for a plug-in's. Raises UserError."""
    return locate(name, installed("trackers"), "telemetry.trackers")


def tracker_sources(telemetry: TelemetryConfig) -> dict[str, str]:
    """Fingerprints of the user's own classes by their names; a file that is not there has none."""
    sources: dict[str, str] = {}
    for name in telemetry.trackers:
        with suppress(UserError):
            sources |= {name: source_fingerprint(own)} if (own := own_tracker(name)) else {}
    return sources


def check_trackers(telemetry: TelemetryConfig) -> None:
    """Raise UserError for a class of the user's that is no tracker, and for a plug-in's whose package is missing.
    Imports none of the latter: they take seconds."""
    for name in telemetry.trackers:
        if own := own_tracker(name):
            _own_class(own)
            continue
        part = description("trackers", name)
        for package in part.packages:
            if installed_version(package) is None:
                raise UserError(
                    f"telemetry.trackers names {name}, and the package {package} is not installed here. Run: "
                    f"pip install 'asyncrl[{part.extra}]', or take {name} out of telemetry.trackers"
                )


def _own_class(own: UserFunction) -> Any:
    """The user's class. Raises UserError, with its line, unless it has a tracker's methods."""
    cls = load(own)
    for name, arguments in METHODS.items():
        method = getattr(cls, name, None)
        with suppress(TypeError):  # there is no such method, or one of other arguments
            inspect.signature(cast(Any, method)).bind(*range(arguments))
            if method is not object.__init__ and not inspect.iscoroutinefunction(method):
                continue
        raise UserError(
            f"telemetry.trackers: {own.name} ({own.path}:{inspect.getsourcelines(cls)[1]}) has no plain method {name} "
            f"(arguments: {arguments}, `self` among them). A tracker has {', '.join(METHODS)}: docs/bring-your-own.md"
        )
    return cls


def openers_of(telemetry: TelemetryConfig) -> dict[str, Opener]:
    """Functions that open the trackers of telemetry.trackers, by name; their modules are imported then."""
    return {name: partial(_open, name, telemetry) for name in telemetry.trackers}


def _open(name: str, telemetry: TelemetryConfig, run: TrackedRun) -> Tracker:
    if own := own_tracker(name):
        return _own_class(own)(run, None)
    part = description("trackers", name)
    return implementation(part.implementation)(run, telemetry.settings_of(part.section) if part.section else None)


def open_trackers(telemetry: TelemetryConfig, run: TrackedRun, errors: Counter[str]) -> Trackers:
    """The trackers of telemetry.trackers. Their errors are counted in `errors`, as `tracker_<name>`."""
    return Trackers(run, openers_of(telemetry), errors, samples_every_steps=SAMPLES_EVERY_STEPS)


class Trackers:
    """All trackers of a run. They are opened by the first call, when it is known whether the run is resumed."""

    def __init__(
        self, run: TrackedRun, openers: Mapping[str, Opener], errors: Counter[str], *, samples_every_steps: int = 1
    ):
        self._run = run
        self._openers = openers
        self._errors = errors
        self._samples_every_steps = samples_every_steps
        self._samples: list[Sample] = []

    @cached_property
    def _threads(self) -> list[TrackerThread]:
        return [TrackerThread(name, self._run, opener, self._errors) for name, opener in self._openers.items()]

    def resume(self, after: int, last_recorded: int, evaluations: Sequence[Mapping[str, Any]]) -> None:
        """Set the fields of TrackedRun before any other call."""
        self._run = replace(self._run, resumed_after=after, last_recorded=last_recorded, evaluations=tuple(evaluations))

    def step(self, record: Mapping[str, Any]) -> None:
        self._pass_samples_on()
        step, metrics = numbers(record)
        self._call(lambda tracker: tracker.step(step, metrics))

    def evaluation(self, record: Mapping[str, Any]) -> None:
        step, results = numbers(record)
        self._call(lambda tracker: tracker.evaluation(step, results))

    def sample(self, record: Mapping[str, Any], images: Mapping[str, bytes]) -> None:
        """Keep the sample: those of one step are passed on together when the next step begins."""
        if self._openers and record["step"] % self._samples_every_steps == 0:
            self._samples.append(Sample(record, tuple(images.values())))

    def _pass_samples_on(self) -> None:
        samples, self._samples = self._samples, []
        if samples:
            self._call(lambda tracker: tracker.samples(samples[0].record["step"], samples))

    def _call(self, call: Call | None) -> None:
        for thread in self._threads:
            thread.put(call)

    def close(self) -> None:
        """Let the trackers write pending calls, within CLOSE_S."""
        if not self._samples and "_threads" not in vars(self):
            return  # nothing was called: none was opened
        self._pass_samples_on()
        self._call(None)
        deadline = time.monotonic() + CLOSE_S
        for thread in self._threads:
            thread.finish(deadline)


class TrackerThread:
    """A thread that opens one tracker, calls it in order, and counts its errors, which never stop training."""

    def __init__(self, tracker: str, run: TrackedRun, opener: Opener, errors: Counter[str]):
        self._tracker = tracker
        self._run = run
        self._opener = opener
        self._errors = errors
        self._file = str(Path(tracker.rpartition(":")[0]).expanduser().absolute())
        self._has_warned = False
        self._queue: queue.Queue[Call | None] = queue.Queue(QUEUE_LENGTH)
        self._thread = threading.Thread(target=self._serve, name=f"tracker {tracker}", daemon=True)
        self._thread.start()

    def put(self, call: Call | None) -> None:
        """Add a call, without waiting; None is the last one."""
        try:
            self._queue.put_nowait(call)
        except queue.Full:
            self._failed(f"it is {QUEUE_LENGTH} calls behind")

    def finish(self, deadline: float) -> None:
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._failed(f"it was not done {CLOSE_S:g} s after the end")

    def _serve(self) -> None:
        try:
            tracker = self._opener(self._run)
        except (Exception, SystemExit) as error:
            self._failed(f"it could not be opened: {one_line(error, self._file)}")
            return
        is_open = True
        while is_open:
            call = self._queue.get()
            is_open = call is not None
            try:
                call(tracker) if call else tracker.close()
            except (Exception, SystemExit) as error:
                self._failed(one_line(error, self._file))

    def _failed(self, why: str) -> None:
        self._errors[f"tracker_{self._tracker.rpartition(':')[2]}"] += 1
        if not self._has_warned:
            self._has_warned = True
            logger.warning("%s lost some data; the run continues: %s (logged once)", self._tracker, why)
