"""Runs checks one after the other, each with a deadline, and tells every finding as soon as it is there."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Generic, TypeVar

from asyncrl.errors import UserError
from asyncrl.tools.doctor.findings import Finding, Findings, problem

logger = logging.getLogger(__name__)

DEADLINE_S = 60.0
T = TypeVar("T")
Tell = Callable[[Finding, float], None]
"""Given a finding and the seconds that it took."""


@dataclass(frozen=True)
class _Done(Generic[T]):
    product: T | None


class Examination:
    def __init__(self, tell: Tell):
        self._tell = tell

    def check(self, what: str, findings: Findings[T], *, deadline_s: float = DEADLINE_S) -> T | None:
        """What the check returns; None if it failed or was not done in time, and then that has been told.

        It runs in a thread of its own, which is left behind where it hangs.
        """
        began = told = time.monotonic()
        found: queue.SimpleQueue[Finding | _Done[T]] = queue.SimpleQueue()
        threading.Thread(target=_work, args=(what, findings, found.put), name=what, daemon=True).start()
        while True:
            try:
                item = found.get(timeout=max(0.0, began + deadline_s - time.monotonic()))
            except queue.Empty:
                late = Finding(what, f"was not done after {deadline_s:g} s", "problem", _late_fix(what))
                self._tell(late, deadline_s)
                return None
            if isinstance(item, _Done):
                return item.product
            self._tell(item, time.monotonic() - told)
            told = time.monotonic()

    def run(self, what: str, findings: Findings[T]) -> T | None:
        """The same in this thread, for a check that keeps its own deadline and cleans up when it is interrupted."""
        told = time.monotonic()

        def tell(finding: Finding) -> None:
            nonlocal told
            self._tell(finding, time.monotonic() - told)
            told = time.monotonic()

        return _run(what, findings, tell)


def _work(what: str, findings: Findings[T], put: Callable[[Finding | _Done[T]], None]) -> None:
    put(_Done(_run(what, findings, put)))


def _run(what: str, findings: Findings[T], tell: Callable[[Finding], None]) -> T | None:
    """One check that fails must not hide what the others find. It is closed where nothing can be told any more."""
    with closing(findings):
        while True:
            try:
                finding = next(findings)
            except StopIteration as end:
                return end.value
            except UserError as error:
                tell(problem(what, error))
                return None
            except Exception as error:
                logger.debug("the check %s failed", what, exc_info=True)
                text = " ".join(str(error).split())
                tell(Finding(what, f"could not be checked: {type(error).__name__}: {text}", "problem", _BROKEN))
                return None
            tell(finding)


_BROKEN = "if the message names nothing of yours, this is a defect of asyncrl: report it with the message"


def _late_fix(what: str) -> str:
    return f"something behind `{what}` hangs: a network file system, a download, a driver, or code of yours"
