"""The learner's pulse: who is silent, and who only seems so because the learner itself stood still."""

from __future__ import annotations

import time
from typing import Any

import pytest

from learner.network.servers import SLOWEST_TURN_S, ModelFacts, Servers, ServerState
from tests.rigs.fuzz import content
from tests.rigs.fuzz.rig import small_config
from tests.rigs.unconnected import Ledger, Ports


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def connected() -> Servers:
    """Two servers and a timeout of 10 s."""
    ports: Any = Ports()
    ledger: Any = Ledger()
    servers = Servers(small_config(timeout_s=10.0), "run", ports, ledger, ModelFacts("m", "p", 9))
    for name in ("a", "b"):
        servers.connected[name] = ServerState(content.hello(name), name.encode(), heard_at=time.monotonic())
    return servers


def test_a_server_that_is_silent_while_we_listen_is_lost(clock: list[float]) -> None:
    servers = connected()
    for _ in range(12):
        clock[0] += 1.0
        servers.connected["b"].heard_at = clock[0]
        servers.keep_alive()
    assert list(servers.connected) == ["b"]


def test_a_learner_that_stood_still_hears_its_servers_out(clock: list[float]) -> None:
    servers = connected()
    servers.keep_alive()
    clock[0] += 3600.0
    servers.keep_alive()
    assert list(servers.connected) == ["a", "b"]
    for _ in range(9):
        clock[0] += 1.0
        servers.connected["b"].heard_at = clock[0]
        servers.keep_alive()
    assert list(servers.connected) == ["b"], f"one turn counts {SLOWEST_TURN_S} s of an hour"
