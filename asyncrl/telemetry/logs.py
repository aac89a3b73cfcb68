"""Logging of a service: one line per record, with time, service and level; what repeats itself is counted, not said."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO

NOISY_LIBRARIES = (
    *("absl", "asyncio", "datasets", "filelock", "fsspec", "httpcore", "httpx", "huggingface_hub", "matplotlib"),
    *("PIL", "torch", "transformers", "urllib3"),
)
"""Libraries of which only warnings are shown."""

LINES_PER_WINDOW = 20
WINDOW_S = 10.0
"""A line of the source writes at most so many records within so many seconds; the rest is counted."""
MAX_LINES_KNOWN = 1024
"""Lines of source that are remembered at once; the one that has been known longest is forgotten first."""

Place = tuple[str, str, int]
"""Logger, file and line number of a logging call: the same whatever values its message has."""


def configure_logging(service: str, level: str | int = "INFO") -> None:
    """Send every record of this process to stderr, replacing earlier handlers."""
    handler = RepeatLimitingHandler(sys.stderr)
    line = f"%(asctime)s {service.replace('%', '%%')} %(levelname)-7s %(name)s: %(message)s"
    handler.setFormatter(logging.Formatter(line, datefmt="%Y-%m-%d %H:%M:%S"))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.captureWarnings(True)
    quiet_deepspeed()
    for library in NOISY_LIBRARIES:
        logging.getLogger(library).setLevel(logging.WARNING)


def quiet_deepspeed() -> None:
    """Leave out DeepSpeed's warning of a machine without a GPU: transformers imports it wherever it is installed."""
    logging.getLogger("DeepSpeed").addFilter(lambda record: "Setting accelerator to CPU" not in record.getMessage())


@dataclass
class _Window:
    """The records of one place since `began`."""

    began: float
    last: logging.LogRecord
    said: int = 0
    unsaid: int = 0


class RepeatLimitingHandler(logging.StreamHandler[TextIO]):
    """A stream handler that bounds what each logging call of the source writes: a peer that sends nonsense, or a
    failure in a loop, would else fill the disk.

    The first LINES_PER_WINDOW records of a place in WINDOW_S are written; the others are counted in one line, with the
    latest message, when the window has ended and anything is logged again, or the process ends. Records of level DEBUG
    are all written: who asks for them wants them.
    """

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(stream)
        self.__clock = clock
        self.__windows: dict[Place, _Window] = {}
        """Windows in the order in which they began."""

    def emit(self, record: logging.LogRecord) -> None:
        now = self.__clock()
        self.__end_windows(began_before=now - WINDOW_S)
        if record.levelno <= logging.DEBUG:
            super().emit(record)
            return
        place = (record.name, record.pathname, record.lineno)
        if place not in self.__windows:
            if len(self.__windows) >= MAX_LINES_KNOWN:
                self.__end_window(next(iter(self.__windows)))
            self.__windows[place] = _Window(now, record)
        window = self.__windows[place]
        window.last = record
        if window.said < LINES_PER_WINDOW:
            window.said += 1
            super().emit(record)
        else:
            window.unsaid += 1

    def close(self) -> None:
        self.acquire()
        try:
            self.__end_windows(began_before=float("inf"))
        finally:
            self.release()
        super().close()

    def __end_windows(self, began_before: float) -> None:
        for place, window in list(self.__windows.items()):
            if window.began > began_before:
                break
            self.__end_window(place)

    def __end_window(self, place: Place) -> None:
        window = self.__windows.pop(place)
        if not window.unsaid:
            return
        last = window.last
        seconds = max(1.0, self.__clock() - window.began)
        times = f"{window.unsaid:,} time{'s' * (window.unsaid > 1)}"
        message = f"repeated {times} in {seconds:.0f} s, the last time: {last.getMessage()}"
        super().emit(logging.LogRecord(last.name, last.levelno, last.pathname, last.lineno, message, None, None))
