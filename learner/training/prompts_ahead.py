"""Prompts of the next step are encoded while this one is trained: images are decoded on a thread of their own.

Image processors take milliseconds of Python for each prompt, a fifth of a step of short completions. The result waits
in the prompt processor's cache; what is not there in time, the step encodes itself.
"""

from __future__ import annotations

import logging
import threading

from asyncrl.processing.processor import PromptProcessor
from learner.groups.ticket import ReceivedGroup
from learner.tickets.ledger import TicketLedger
from learner.training.batch import segments_of

logger = logging.getLogger(__name__)

MOST_BYTES = 128 * 2**20
"""Bytes of pixels that may wait for a step: half of the processor's cache, so that none is dropped before its use."""


class PromptsAhead:
    """A thread that encodes the prompts of the groups that the next step takes, as they arrive."""

    def __init__(self, ledger: TicketLedger, processor: PromptProcessor):
        self._ledger = ledger
        self._processor = processor
        self._encoded: dict[int, int] = {}
        """Bytes of pixels by ticket, of groups that no step has taken."""
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="prompts-ahead", daemon=True)
        self._thread.start()

    def close(self) -> None:
        with self._ledger.changed:
            self._closed = True
            self._ledger.changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._ledger.changed:
                self._ledger.changed.wait_for(lambda: self._closed or self._next() is not None)
                if self._closed:
                    return
                item = self._next()
            assert item is not None
            number = item.ticket.ticket_id
            self._encoded[number] = 0
            try:
                observed = [segments_of(item, index) for index in range(len(item.group.trajectories))]
                prompt = self._processor.encode(item.prompt, item.blobs)
                self._encoded[number] = prompt.nbytes + sum(
                    s.observed.nbytes for row in observed for s in row if s.observed
                )
            except Exception as error:  # the step encodes it again, and says what is wrong
                logger.debug("ticket %d could not be encoded ahead: %s", number, error)

    def _next(self) -> ReceivedGroup | None:
        """The first group of the next step whose prompt is not encoded; None where there is no room for more."""
        coming = self._ledger.coming()
        self._encoded = {i: self._encoded[i] for i in self._encoded.keys() & {item.ticket.ticket_id for item in coming}}
        if sum(self._encoded.values()) >= MOST_BYTES:
            return None
        return next((item for item in coming if item.ticket.ticket_id not in self._encoded), None)
