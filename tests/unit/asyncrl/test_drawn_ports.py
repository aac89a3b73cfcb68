"""Ports of launched runs: two launchers never have one port, nor does one launcher have it twice."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import zmq
from prometheus_client import start_http_server

from asyncrl.config.schema import RunConfig
from asyncrl.errors import UserError
from asyncrl.launch import drawn_ports
from asyncrl.launch.drawn_ports import claim_port, draw_ports, free_port, is_claimed
from asyncrl.launch.ports import fixed_ports, reserve_ports
from asyncrl.tools.doctor.network import find_ports
from protocol.endpoints import BindError, PortInUseError, bind
from tests.rigs.two_processes import write_config

MakeConfig = Callable[..., RunConfig]
ROOT = Path(__file__).parents[3]
linux = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a process knows its own claims alone")


NUM_FEW = 24


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> int:
    """The first of a few free ports to draw from: whoever does not heed the others has theirs.

    They lie below those that the launchers of other tests draw.
    """
    starts = (2000 + (os.getpid() + number) % 300 * NUM_FEW for number in range(300))
    first = next(start for start in starts if are_free(range(start, start + NUM_FEW)))
    assert first + NUM_FEW <= drawn_ports._FIRST_PORT
    monkeypatch.setattr(drawn_ports, "_FIRST_PORT", first)
    monkeypatch.setattr(drawn_ports, "_first_ephemeral_port", lambda: first + NUM_FEW)
    monkeypatch.setattr(drawn_ports, "_TRIES", 2000)
    return first


def are_free(ports: range) -> bool:
    with ExitStack() as kept:
        return all(drawn_ports._draw("127.0.0.1", port, kept) for port in ports)


def ports_of(config: RunConfig) -> set[int]:
    return {port for *_, port in fixed_ports(config)}


def test_a_free_port_is_not_one_that_the_system_gives_to_outgoing_connections() -> None:
    first_ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    found = {free_port() for _ in range(50)}
    assert max(found) < first_ephemeral
    assert len(found) > 40, "two processes that look at the same time find different ones"


@pytest.mark.usefixtures("few")
def test_two_launchers_draw_different_ports_and_their_services_can_bind_them(make_config: MakeConfig) -> None:
    config = make_config(rollout={"servers": 3})
    with reserve_ports(config) as one, reserve_ports(config) as other:
        mine = ports_of(one)
        assert len(mine) == len(ports_of(other)) == 6
        assert not mine & ports_of(other)
        for _ in range(2):  # a service, and itself when it starts again
            with zmq.Context() as context, context.socket(zmq.ROUTER) as service:
                bind(service, one.control_endpoint, setting="network.control_port")
            server, thread = start_http_server(one.telemetry.rollout_port, addr="127.0.0.1")
            server.shutdown()
            server.server_close()
            thread.join()
    assert not any(map(is_claimed, mine))


@linux
def test_a_port_of_a_run_is_refused_by_name_while_its_services_are_away(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    """config.yaml of a run names the ports that it drew, and further runs are started from it."""
    code = """
import sys
from pathlib import Path
from asyncrl.config.load import load_config
from asyncrl.launch.ports import reserve_ports
with reserve_ports(load_config(Path(sys.argv[1]), [])) as config:
    print(config.network.control_port, flush=True)
    sys.stdin.read()
"""
    command = [sys.executable, "-c", code, str(write_config(make_config(), tmp_path / "config"))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as launcher:
        assert launcher.stdout is not None
        port = int(launcher.stdout.readline())
        again = make_config(network={"control_port": port})
        kept = rf"port {port} .*is kept for .* run that was started on this machine"
        with pytest.raises(UserError, match=rf"{kept}.* set network\.control_port to another port"):
            reserve_ports(again).__enter__()
        (found,) = [finding for finding in find_ports(again) if finding.verdict == "problem"]
        assert "network.control_port" in found.fix
        launcher.send_signal(signal.SIGKILL)
        launcher.wait()
    with reserve_ports(again) as config:
        assert config.network.control_port == port
    assert not [finding for finding in find_ports(again) if finding.verdict == "problem"]


def test_a_zero_does_not_become_a_port_that_was_asked_for(make_config: MakeConfig, few: int) -> None:
    with reserve_ports(make_config(telemetry={"rollout_port": few + 2}, rollout={"servers": 18})) as config:
        assert len(ports_of(config)) == 21


def test_where_names_do_not_vanish_with_their_process_it_knows_its_own(
    make_config: MakeConfig, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    for _ in range(20):
        with reserve_ports(make_config(rollout={"servers": 3})) as config:
            assert len(ports_of(config)) == 6
    with ExitStack() as kept:
        claim_port(few, kept, setting="a")
        assert is_claimed(few)
        with pytest.raises(PortInUseError, match="set b to another port"):
            claim_port(few, kept, setting="b")
    assert not is_claimed(few)


def test_more_servers_than_ports_are_refused(make_config: MakeConfig, few: int) -> None:
    for servers in (NUM_FEW, NUM_FEW + 1, 1000):
        with pytest.raises(
            UserError, match=rf"no {servers} free ports in a row found from {few} to {few + NUM_FEW - 1}"
        ):
            reserve_ports(make_config(rollout={"servers": servers})).__enter__()


def test_a_process_that_may_open_no_more_files_says_so() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as kept:
        kept.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        with pytest.raises(BindError, match=r"ulimit -n"):
            draw_ports("127.0.0.1", 1, kept)
