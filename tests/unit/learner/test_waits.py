"""The main thread's waits for what the network thread brings."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

from learner.network.thread import NetworkThread


def test_progress_is_told_by_the_clock_however_often_the_ledger_changes() -> None:
    """Where groups arrive all the time, no wait lasts for a second, and the run would look as if it had stopped."""
    changed, told, over = threading.Condition(), [], time.monotonic() + 2.5
    waiter: Any = SimpleNamespace(
        _ledger=SimpleNamespace(changed=changed), check=lambda: None, parity=None, _told_at=time.monotonic()
    )

    def arrive() -> None:
        while time.monotonic() < over:
            time.sleep(0.05)
            with changed:
                changed.notify_all()

    arriving = threading.Thread(target=arrive)
    arriving.start()
    while time.monotonic() < over:  # one wait for each arrival, as for the groups of a step
        since = time.monotonic()
        NetworkThread.wait_until(
            waiter,
            lambda since=since: time.monotonic() > since + 0.04,
            timeout_s=60,
            what=lambda: "an arrival",
            progress=lambda: told.append(time.monotonic()),
        )
    arriving.join()
    assert 1 <= len(told) <= 3
