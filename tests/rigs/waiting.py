"""Wait for what should come about, and say what did not."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.rigs.prefork import Service
from tests.rigs.small_runs import logs


def wait_until(
    condition: Callable[[], bool],
    what: str,
    logs_in: Path | None = None,
    timeout_s: float = 60.0,
    *,
    poll_s: float = 0.02,
) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {what}\n{logs(logs_in) if logs_in else ''}"
        time.sleep(poll_s)


def exit_codes(services: Sequence[Service], timeout_s: float = 120.0) -> list[int]:
    """Return the exit codes of processes that end by themselves; all are gone on return."""
    try:
        return [service.wait(timeout=timeout_s) for service in services]
    finally:
        for service in services:
            if service.poll() is None:
                service.kill()
                service.wait()
