"""Many servers: two connections each, and no limit of open files that the system would let us raise."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq

from asyncrl.config.schema import RunConfig
from learner.network.servers import ModelFacts, Servers, ServerState
from learner.network.sockets import open_sockets
from protocol.messages import ServerHeartbeat
from tests.rigs.fuzz import content
from tests.rigs.ports import own_port
from tests.rigs.unconnected import Ledger, Ports

MakeConfig = Callable[..., RunConfig]


@pytest.fixture
def few_files() -> Iterator[int]:
    """The usual limit, below what the system allows; returns that."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, hard), hard))
    yield hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_learner_takes_as_many_connections_as_the_system_allows(make_config: MakeConfig, few_files: int) -> None:
    context = zmq.Context()
    network = make_config(network={"control_port": own_port(), "weights_port": own_port()}).network
    open_sockets(network, 2**20, context).close()
    context.term()
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == few_files


@pytest.mark.parametrize("holds", [False, True])
def test_an_idle_server_is_lost_only_if_it_has_had_a_ticket_for_as_long(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, holds: bool
) -> None:
    now, asked = [1000.0], list[float]()
    monkeypatch.setattr("learner.network.servers.time.monotonic", lambda: now[0])
    ports: Any = Ports()
    ledger: Any = Ledger()
    ledger.holds_since = lambda server_id, moment: asked.append(moment) or holds
    config = make_config(network={"timeout_s": 30.0})
    servers = Servers(
        config.network,
        config.trainer.mode,
        config.rollout.quantization,
        "run",
        ports,
        ledger,
        ModelFacts("m", "p", 100),
    )
    servers.connected["a"] = ServerState(content.hello("a"), b"a")
    numbers = dict.fromkeys(ServerHeartbeat.model_fields.keys() - {"type"}, 0)
    for second in range(61):
        if "a" in servers.connected:
            now[0] = 1000.0 + second
            servers.take_heartbeat("a", ServerHeartbeat(**numbers))
    assert ("a" in servers.connected) is not holds
    assert asked == [1001.0] if holds else [1001.0, 1009.0, 1017.0, 1025.0], "first when it is idle for over 30 s"
