"""Ports for services of a test that start later, while other tests run beside it."""

from __future__ import annotations

import atexit
from contextlib import ExitStack

from asyncrl.launch.ports import draw_ports

_kept = ExitStack()
atexit.register(_kept.close)


def own_port() -> int:
    """Port on 127.0.0.1. No other test and no launcher takes it while this process lives."""
    return draw_ports("127.0.0.1", 1, _kept)
