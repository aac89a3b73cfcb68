"""How the main thread waits: for a server, for a batch, for the end of an evaluation."""

from __future__ import annotations

import time
from collections.abc import Callable

from asyncrl.errors import WaitTimeoutError
from learner.network.thread import NetworkThread
from learner.tickets.ledger import TicketLedger

_LOOK_EVERY_S = 1.0
"""How often a wait looks for its deadline."""


def wait_for(
    exchange: NetworkThread,
    ledger: TicketLedger,
    satisfied: Callable[[], bool],
    *,
    timeout_s: float,
    what: Callable[[], str],
    progress: Callable[[], None] = lambda: None,
    judge: Callable[[], None] | None = None,
) -> None:
    """Block until `satisfied`, calling `progress` about once a second, and `judge` when a parity check has come back.

    Time in which this process was stopped does not count. Raises the exchange's failure, or WaitTimeoutError saying
    what was waited for.
    """
    left = timeout_s
    while True:
        began = time.monotonic()
        with ledger.changed:
            exchange.check()
            if satisfied():
                return
            if left <= 0:
                raise WaitTimeoutError(f"waited {timeout_s:g} s for {what()}")
            judging = judge is not None and exchange.alignment.has_complete
            woken = judging or ledger.changed.wait(min(left, _LOOK_EVERY_S))
        if judging and judge is not None:
            judge()
        if not woken:
            progress()
        left -= min(time.monotonic() - began, 2 * _LOOK_EVERY_S)
