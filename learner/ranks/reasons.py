"""Reasons of ranks that end, in the ranks' store: the others may be on other machines, where nobody sees its log."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from contextlib import suppress

from torch.distributed import DistError
from torch.distributed.distributed_c10d import PrefixStore, Store

from asyncrl.errors import BadStateError, RestartError, UserError

Reason = UserError | BadStateError | RestartError
REASONS = (UserError, BadStateError, RestartError)
POLL_S = 0.05
PATIENCE_S = 1.0
"""A collective fails on a rank's connections a moment before its reason is in the store, or it is seen to be gone."""
HEARING_S = 60.0
"""Time of the other ranks to hear why rank 0 ends: one on a slow or busy machine may still be at its imports."""


class Reasons:
    """Reasons that the user, a state or the memory has caused. A rank that was killed has none here."""

    def __init__(self, store: Store, rank: int):
        self._store = PrefixStore("reasons", store)
        self._rank = rank

    def say(self, error: Reason) -> None:
        kind = next(number for number, kind in enumerate(REASONS) if isinstance(error, kind))
        with suppress(DistError, RuntimeError):  # rank 0 has gone with the store
            self._store.set(str(self._rank), json.dumps([kind, str(error)]))

    def of(self, rank: int) -> Reason | None:
        """Reason that a rank reported before it ended."""
        with suppress(DistError, RuntimeError):
            if self._store.check([str(rank)]):
                kind, reason = json.loads(self._store.get(str(rank)))
                self._store.set(_heard(self._rank), "")
                return REASONS[kind](f"rank {rank}: {reason}")
        return None

    def say_to_all(self, error: Reason, size: int) -> None:
        """Say it, and wait until each rank has heard it or ends for a reason of its own: this one may take the store
        with it."""
        self.say(error)
        deadline, others = time.monotonic() + HEARING_S, range(1, size)
        with suppress(DistError, RuntimeError):
            while time.monotonic() < deadline and not all(self._knows(rank) for rank in others):
                time.sleep(POLL_S)

    def _knows(self, rank: int) -> bool:
        return self._store.check([_heard(rank)]) or self._store.check([str(rank)])

    def wait_for_one(self, ranks: Iterable[int]) -> Reason | None:
        """Reason that one of the ranks reports within PATIENCE_S, after a collective has failed."""
        deadline, others = time.monotonic() + PATIENCE_S, list(ranks)
        while time.monotonic() < deadline:
            if said := next(filter(None, map(self.of, others)), None):
                return said
            time.sleep(POLL_S)
        return None


def _heard(rank: int) -> str:
    return f"heard by {rank}"
