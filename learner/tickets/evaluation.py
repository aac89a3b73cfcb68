"""An evaluation: every held-out row once, sampled by one policy version, while training goes on beside it.

Rows become tickets as there is room for them, so that only those with a server have their images in memory; of a row
that has come back only its scores are kept.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from learner.groups.ticket import PreparedTicket, ReceivedGroup
from protocol.messages import TrajectoryRecord


class Evaluation:
    """Thread-safe under the ledger's lock, but for `tickets`, which belongs to the network thread."""

    def __init__(
        self,
        step: int,
        version: int,
        rows: int,
        write: Callable[[int, int], PreparedTicket],
        lock: threading.Condition,
    ):
        """`write` makes the ticket of a row, by its index and the version."""
        self.step = step
        self.version = version
        self.rows = rows
        self._write = write
        self._lock = lock
        self._unwritten = iter(range(rows))
        self._num_taken = 0
        self._records: dict[int, Sequence[TrajectoryRecord]] = {}
        self._began = time.monotonic()
        self._ended: float | None = None

    def tickets(self, most: int) -> Iterator[PreparedTicket]:
        """The next rows' tickets, each written when it is asked for."""
        taken = list(islice(self._unwritten, most))
        self._num_taken += len(taken)
        return (self._write(index, self.version) for index in taken)

    @property
    def has_more(self) -> bool:
        """True if rows are left that `tickets` has not given out."""
        return self._num_taken < self.rows

    def keep(self, received: ReceivedGroup) -> None:
        """Keep the scores of a row's verified group."""
        self._finish(received.slot.ticket_id, received.group.trajectories)

    def give_up(self, item: PreparedTicket) -> None:
        """Go on without a score for a row whose ticket has failed for good."""
        self._finish(item.slot.ticket_id, ())

    def _finish(self, ticket_id: int, records: Sequence[TrajectoryRecord]) -> None:
        with self._lock:
            self._records[ticket_id] = records
            if self.is_complete:
                self._ended = time.monotonic()
            self._lock.notify_all()

    @property
    def arrived(self) -> int:
        """Number of rows that have come back, or were given up."""
        with self._lock:
            return len(self._records)

    @property
    def is_complete(self) -> bool:
        return self.arrived == self.rows

    @property
    def seconds(self) -> float:
        """Wall-clock time from the beginning to the last row, or until now."""
        with self._lock:
            return (self._ended or time.monotonic()) - self._began

    def records(self) -> list[Sequence[TrajectoryRecord]]:
        """Trajectories of each row that has come back, in row order; none for a row that was given up."""
        with self._lock:
            return [records for _, records in sorted(self._records.items())]
