"""A clean stop: the first SIGTERM or Ctrl-C lets the learner finish its step and write a checkpoint within the grace.

A second signal, or the end of that time, ends the process at once: the next start makes the steps since the newest
checkpoint again, from the journal.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from learner.loop.saver import Saver
from learner.loop.step_schedule import StepSchedule
from learner.network.device_lease import LearnerLease
from learner.network.thread import NetworkThread
from protocol.messages import Goodbye

logger = logging.getLogger(__name__)

PARTING_S, PARTING_SHARE = 10.0, 1 / 3
"""Time kept of the grace for goodbyes, trackers and exit handlers, and its largest share."""
EVALUATION_SHARE = 0.5
"""Largest share of what is left that an evaluation may take which has to end before the checkpoint."""
INTERRUPTED = "the learner was interrupted"


class StopAsked(KeyboardInterrupt):
    """The run is to stop, between two steps. Raised once, where the main thread waits or begins a step."""


class CleanStop:
    """Hears the signals. Used by the main thread, whose handlers run between two of its bytecodes."""

    def __init__(self, grace_s: float):
        self.grace_s = grace_s
        self.hurries = False
        """True after the second signal, or the end of the grace: nothing is waited for."""
        self._asked_at = 0.0
        self._was_raised = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Hear SIGTERM and Ctrl-C within the block; nothing is heard beside the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        heard = {signal.SIGTERM: self._hear, signal.SIGINT: self._hear, signal.SIGALRM: self._hear}
        before = {number: signal.signal(number, handler) for number, handler in heard.items()}
        try:
            yield
        finally:
            self.over()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _hear(self, number: int, _frame: Any) -> None:
        if self._asked_at or number == signal.SIGALRM:
            self.hurries = True
            raise KeyboardInterrupt
        self._asked_at = time.monotonic()
        signal.setitimer(signal.ITIMER_REAL, max(self.left_s, 0.01))

    @property
    def left_s(self) -> float:
        """Seconds until the checkpoint has to be written."""
        kept = min(PARTING_S, PARTING_SHARE * self.grace_s)
        return self._asked_at + self.grace_s - kept - time.monotonic()

    def check(self) -> None:
        """Raise StopAsked, the first time after the signal: what is done for the stop may wait as well."""
        if self._asked_at and not self._was_raised:
            self._was_raised = True
            raise StopAsked

    def over(self) -> None:
        """The checkpoint is written: what is left has deadlines of its own."""
        signal.setitimer(signal.ITIMER_REAL, 0)

    def save(self, saver: Saver, schedule: StepSchedule, network: NetworkThread, device: LearnerLease) -> None:
        """Write a checkpoint of the last step, unless it has one. An evaluation of an earlier step comes before it,
        where servers are there to end it: a restart could not make its version again."""
        step, began = schedule.progress.step, time.monotonic()
        if step <= saver.saved_step:
            has = "its checkpoint is there, or being written" if step else "there is nothing to save"
            logger.info("stopping after step %d: %s", step, has)
            schedule.status("stopping", "")
        else:
            logger.info(
                "stopping after step %d: its checkpoint is written within %.0f s (trainer.stop_grace_s=%g). Another "
                "signal ends the learner at once",
                *(step, self.left_s, self.grace_s),
            )
            schedule.status("stopping", f"the checkpoint of step {step}")
            latest = began + EVALUATION_SHARE * self.left_s
            schedule.finish_evaluation(
                before_step=step, gives_up=lambda: not network.servers.connected or time.monotonic() > latest
            )
            if device.is_lent:  # a server that ends returns it at once, whatever it generates
                network.call_soon(network.servers.send_to_all, Goodbye(reason=INTERRUPTED, expected=False))
                schedule.take_device_back()
            saver.save()
        saver.finish()
        self.over()

    def tell_loss(self, saver: Saver, step: int) -> None:
        """Say where the run ends without a checkpoint of its last step."""
        if self.hurries and not saver.has_written(step):
            logger.warning(
                "step %d has no checkpoint: the next start makes the steps since the newest one again, from the "
                "journal. A second signal came, or step and checkpoint take longer than trainer.stop_grace_s=%g leaves",
                *(step, self.grace_s),
            )
