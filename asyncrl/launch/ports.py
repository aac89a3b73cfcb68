"""The ports of a launched run: a zero becomes a free one, a usual one that is taken too, any other has to be free, and
no other launcher takes them.

Claiming a port reserves its number for services that start later, or start again, since nothing listens on it
meanwhile. A claim is an abstract socket of Linux, which all processes that share the ports see, and which vanishes with
its process; elsewhere there are none. Launchers and `asyncrl doctor` heed claims; any other program may still bind the
port.
"""

from __future__ import annotations

import errno
import random
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from asyncrl.config.run_sections import NetworkConfig, TelemetryConfig
from asyncrl.config.schema import RunConfig
from asyncrl.errors import UserError
from protocol.endpoints import BindError, PortInUseError, check_bind, is_loopback

PORTS = (
    ("network", "control_port"),
    ("network", "weights_port"),
    ("telemetry", "learner_port"),
    ("telemetry", "rollout_port"),
)
_EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_USUAL_EPHEMERAL_PORT = 32768
_FIRST_PORT, _LAST_PORT = 10240, 65535
"""Range that ports are drawn from: above most well-known services."""
_TRIES = 100


@contextmanager
def reserve_ports(config: RunConfig, say: Callable[[str], object] = lambda _: None) -> Iterator[RunConfig]:
    """Replace port 0 by free ports, and a usual port that is taken (`may_move`), which is told to `say`; no other
    launcher takes one of the run's ports in the block. Raises UserError."""
    sections: dict[str, dict[str, int]] = {"network": {}, "telemetry": {}}
    with ExitStack() as claims:
        try:
            taken = _claim_fixed_ports(config, claims)
            for section, key in PORTS:
                usual, host = getattr(getattr(config, section), key), getattr(config, section).host
                fixed = 0 if f"{section}.{key}" in taken else usual
                port = fixed or draw_ports(host, _num_ports(config.rollout.servers, key), claims)
                sections[section][key] = port
                if usual not in (0, port):
                    say(f"port {usual} ({section}.{key}) is in use: this run takes {port}")
        except BindError as error:
            raise UserError(str(error)) from None
        yield config.model_copy(
            update={name: getattr(config, name).model_copy(update=ports) for name, ports in sections.items()}
        )


def may_move(section: NetworkConfig | TelemetryConfig, key: str) -> bool:
    """True for a port at its default that nobody on another machine can dial: a second run takes another one."""
    is_default = getattr(section, key) == type(section).model_fields[key].default
    return is_default and (section.host == "localhost" or is_loopback(section.host))


def _claim_fixed_ports(config: RunConfig, claims: ExitStack) -> set[str]:
    """Check that fixed ports are distinct and on an address of this machine, and claim them. Returns the settings of
    those that are taken and may move. Raises UserError with all others that are taken."""
    moved: set[str] = set()
    refused: dict[str, str] = {}
    for section, key in PORTS:
        check_bind(getattr(config, section).host, 0, setting=f"{section}.{key}")
    owners: dict[int, str] = {}
    for name, setting, host, port in fixed_ports(config):
        if port in owners:
            raise UserError(f"{owners[port]} and {name} are both {port}. Set one of them to 0 or another port")
        owners[port] = name
        try:
            check_bind(host, port, setting=setting)
            claim_port(port, claims, setting=setting)
        except PortInUseError as problem:
            section, _, key = setting.partition(".")
            if may_move(getattr(config, section), key):
                moved.add(setting)
            else:
                refused.setdefault(setting, str(problem))
    if len(refused) > 1:
        raise UserError("\n".join([*refused.values(), "All at once: " + " ".join(f"{name}=0" for name in refused)]))
    if refused:
        raise UserError(*refused.values())
    return moved


def _num_ports(servers: int, key: str) -> int:
    return servers if key == "rollout_port" else 1


def fixed_ports(config: RunConfig) -> Iterator[tuple[str, str, str, int]]:
    """Name of each port that is not 0, the setting that it comes from, its address and its number."""
    for section, key in PORTS:
        host, first = getattr(config, section).host, getattr(getattr(config, section), key)
        for port in range(first, first + _num_ports(config.rollout.servers, key)) if first else ():
            name = f"{section}.{key}" + (f" + {port - first} (rollout.servers)" if port > first else "")
            yield name, f"{section}.{key}", host, port


def draw_ports(host: str, count: int, claims: ExitStack) -> int:
    """The first of `count` ports in a row that were free, now claimed until `claims` ends.

    From below the ports that the system gives to outgoing connections: one of those may be taken while its owner is
    away, even by a peer that keeps dialling it and so meets itself. Raises BindError.
    """
    end = _first_ephemeral_port()
    ports = range(_FIRST_PORT, end - count + 1)
    for _ in range(_TRIES if ports else 0):
        first = random.SystemRandom().choice(ports)
        with ExitStack() as drawn:
            try:
                for port in range(first, first + count):
                    claim_port(port, drawn, setting="port")
                    check_bind(host, port, setting="port")
            except PortInUseError:
                continue
            claims.push(drawn.pop_all())
            return first
    row = f"{count} free ports in a row" if count > 1 else "free port"
    raise BindError(f"no {row} found from {_FIRST_PORT} to {end - 1} on {host}")


def free_port(host: str = "127.0.0.1") -> int:
    """A port that was free a moment ago. Raises BindError."""
    with ExitStack() as claims:
        return draw_ports(host, 1, claims)


def claim_port(port: int, claims: ExitStack, *, setting: str) -> None:
    """Claim a port until `claims` ends. Raises PortInUseError where another launcher has it."""
    if sys.platform != "linux":
        return
    claim = claims.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
    try:
        claim.bind(f"\0asyncrl-port-{port}")
    except OSError as problem:
        if problem.errno != errno.EADDRINUSE:
            raise BindError(f"port {port} cannot be claimed: {problem.strerror}") from None
        raise PortInUseError(
            f"port {port} is kept for another run that was started on this machine, on whatever address. Stop that "
            f"run, or set {setting} to another port (0 takes a free one)"
        ) from None


def _first_ephemeral_port() -> int:
    try:
        first = int(_EPHEMERAL_PORTS.read_text(encoding="utf-8").split()[0])
    except (OSError, ValueError, IndexError):
        return _USUAL_EPHEMERAL_PORT
    return first if first > _FIRST_PORT + _TRIES else _LAST_PORT + 1
