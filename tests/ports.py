"""Ports for services of a test that start later, while other tests run beside it."""

from __future__ import annotations

import atexit
from contextlib import ExitStack

from protocol.endpoints import kept_ports

_KEPT = ExitStack()
atexit.register(_KEPT.close)


def own_port() -> int:
    """On 127.0.0.1. No other test and no launcher is given it while this process lives."""
    return _KEPT.enter_context(kept_ports())
