"""Free ports, and ports that are claimed for services that start later, or start again.

A claim is a name for a port, since nobody listens on it meanwhile: an abstract socket of Linux, which all processes
that share the ports see, and which vanishes with its process. Elsewhere a process knows its own claims alone. Launchers
and `asyncrl doctor` heed claims; any other program may still bind the port.
"""

from __future__ import annotations

import errno
import random
import socket
import sys
from contextlib import ExitStack
from pathlib import Path

from protocol.endpoints import BindError, PortInUseError, check_bind

_EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_USUAL_EPHEMERAL_PORT = 32768
_FIRST_PORT, _LAST_PORT = 10240, 65535
"""Of those that are drawn: above most well-known services."""
_TRIES = 100
_claimed: set[int] = set()
"""By this process."""


def draw_ports(host: str, count: int, kept: ExitStack) -> int:
    """The first of `count` ports in a row that were free, now claimed until `kept` ends.

    From below the ports that the system gives to outgoing connections: one of those may be taken while its owner is
    away, even by a peer that keeps dialling it and so meets itself. Raises BindError.
    """
    ports = range(_FIRST_PORT, _first_ephemeral_port() - count + 1)
    for _ in range(_TRIES if ports else 0):
        first = random.SystemRandom().choice(ports)
        with ExitStack() as drawn:
            if all(_draw(host, port, drawn) for port in range(first, first + count)):
                kept.push(drawn.pop_all())
                return first
    row = f"{count} free ports in a row" if count > 1 else "free port"
    raise BindError(f"no {row} found from {_FIRST_PORT} to {_first_ephemeral_port() - 1} on {host}")


def free_port(host: str = "127.0.0.1") -> int:
    """One that was free a moment ago. Raises BindError."""
    with ExitStack() as kept:
        return draw_ports(host, 1, kept)


def _draw(host: str, port: int, kept: ExitStack) -> bool:
    try:
        claim_port(port, kept, setting="port")
        check_bind(host, port, setting="port")
    except PortInUseError:
        return False
    return True


def claim_port(port: int, kept: ExitStack, *, setting: str) -> None:
    """Until `kept` ends. Raises PortInUseError where somebody has claimed it, BindError where that cannot be known."""
    if port in _claimed or (sys.platform == "linux" and not _take_name(port, kept)):
        raise PortInUseError(
            f"port {port} is kept for another run that was started on this machine, on whatever address. Stop that "
            f"run, or set {setting} to another port (0 takes a free one)"
        )
    _claimed.add(port)
    kept.callback(_claimed.discard, port)


def is_claimed(port: int) -> bool:
    if port in _claimed or sys.platform != "linux":
        return port in _claimed
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as asking:
        return asking.connect_ex(_name(port)) == 0


def _take_name(port: int, kept: ExitStack) -> bool:
    try:
        kept.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)).bind(_name(port))
    except OSError as problem:
        if problem.errno == errno.EADDRINUSE:
            return False
        fix = {
            errno.EMFILE: "Raise the limit: ulimit -n 4096",
            errno.EACCES: "Allow this process to bind abstract Unix sockets",
            errno.EPERM: "Allow this process to bind abstract Unix sockets",
        }.get(problem.errno or 0, "Make room for another socket on this machine")
        raise BindError(f"port {port} cannot be claimed: {problem.strerror}. {fix}") from None
    return True


def _name(port: int) -> str:
    return f"\0asyncrl-port-{port}"


def _first_ephemeral_port() -> int:
    try:
        first = int(_EPHEMERAL_PORTS.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return _USUAL_EPHEMERAL_PORT
    return first if first > _FIRST_PORT + _TRIES else _LAST_PORT + 1
