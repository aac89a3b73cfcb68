"""Ports of launched runs: fixed ones are kept or refused by name, and two launchers never have one port."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.run_sections import NetworkConfig, TelemetryConfig
from asyncrl.config.schema import RunConfig
from asyncrl.errors import UserError
from asyncrl.launch import ports
from asyncrl.launch.ports import fixed_ports, free_port, reserve_ports
from tests.rigs.two_processes import write_config

MakeConfig = Callable[..., RunConfig]
ROOT = Path(__file__).parents[3]


def ports_of(config: RunConfig) -> set[int]:
    return {port for *_, port in fixed_ports(config)}


def test_a_free_port_is_not_one_that_the_system_gives_to_outgoing_connections() -> None:
    first_ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    found = {free_port() for _ in range(50)}
    assert max(found) < first_ephemeral
    assert len(found) > 40, "two processes that look at the same time find different ones"


def test_two_launchers_draw_different_ports(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """From so few that one who does not heed the other would take some of the same."""
    first = free_port()
    monkeypatch.setattr(ports, "_FIRST_PORT", first)
    monkeypatch.setattr(ports, "_first_ephemeral_port", lambda: first + 40)
    monkeypatch.setattr(ports, "_TRIES", 2000)
    config = make_config(rollout={"servers": 3})
    with reserve_ports(config) as one, reserve_ports(config) as other:
        mine = ports_of(one)
        assert len(mine) == len(ports_of(other)) == 6
        assert not mine & ports_of(other)
    with pytest.raises(UserError, match=rf"no 41 free ports in a row found from {first} to {first + 39}"):
        reserve_ports(make_config(rollout={"servers": 41})).__enter__()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a process knows its own claims alone")
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
        launcher.send_signal(signal.SIGKILL)
        launcher.wait()
    with reserve_ports(again) as config:
        assert config.network.control_port == port


@pytest.fixture
def usual_ports_are_taken() -> Iterator[list[int]]:
    """By listeners of this test, or by whoever has them."""
    ports = [NetworkConfig().control_port, NetworkConfig().weights_port]
    ports += [TelemetryConfig().learner_port, TelemetryConfig().rollout_port]
    with ExitStack() as listeners:
        for port in ports:
            with suppress(OSError):
                listeners.enter_context(socket.create_server(("127.0.0.1", port)))
        yield ports


def with_usual_ports(config: RunConfig, **network: Any) -> RunConfig:
    return config.model_copy(update={"network": NetworkConfig(**network), "telemetry": TelemetryConfig()})


def test_a_second_run_takes_other_ports_than_the_usual_ones_and_says_so(
    make_config: MakeConfig, usual_ports_are_taken: list[int]
) -> None:
    config, said = with_usual_ports(make_config(rollout={"servers": 2})), list[str]()
    with reserve_ports(config, said.append) as resolved:
        taken = [port for *_, port in fixed_ports(resolved)]
        assert len(set(taken)) == 5
        assert not set(taken) & set(usual_ports_are_taken)
        assert [line.split()[1] for line in said] == [str(port) for port in usual_ports_are_taken]
        with reserve_ports(config) as third:
            assert not set(taken) & {port for *_, port in fixed_ports(third)}


def test_taken_ports_that_others_may_dial_are_refused_all_at_once(
    make_config: MakeConfig, usual_ports_are_taken: list[int]
) -> None:
    """A number that somebody has chosen, and a usual one that servers on other machines dial."""
    others = with_usual_ports(make_config(), host="0.0.0.0", insecure=True)
    with pytest.raises(UserError, match=r"All at once: network\.control_port=0 network\.weights_port=0$"):
        reserve_ports(others).__enter__()
    chosen = make_config(
        network={"control_port": usual_ports_are_taken[3]}, telemetry={"learner_port": usual_ports_are_taken[0]}
    )
    with pytest.raises(UserError, match=r"All at once: network\.control_port=0 telemetry\.learner_port=0$"):
        reserve_ports(chosen).__enter__()


def test_a_fixed_port_is_kept_and_a_busy_one_is_refused_by_name(make_config: MakeConfig) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        busy = listener.getsockname()[1]
        config = make_config(telemetry={"rollout_port": busy})
        with pytest.raises(UserError, match=rf"telemetry\.rollout_port.*{busy}|{busy}.*telemetry\.rollout_port"):
            reserve_ports(config).__enter__()
        two = make_config(telemetry={"rollout_port": busy - 1}, rollout={"servers": 2})
        with pytest.raises(UserError, match=r"rollout_port \+ 1 \(rollout\.servers\)|rollout_port to another"):
            reserve_ports(two).__enter__()
    with reserve_ports(config) as resolved:
        assert resolved.telemetry.rollout_port == busy
    config = make_config(network={"control_port": 5555}, telemetry={"learner_port": 5555})
    with pytest.raises(UserError, match=r"network\.control_port and telemetry\.learner_port are both"):
        reserve_ports(config).__enter__()
