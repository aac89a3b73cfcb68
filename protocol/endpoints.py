"""Where sockets may bind, free ports, and which processes share memory."""

from __future__ import annotations

import errno
import ipaddress
import os
import random
import re
import socket
import uuid
from pathlib import Path

import zmq

SHARED_MEMORY = Path("/dev/shm")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_USUAL_EPHEMERAL_PORT = 32768
_FIRST_PORT, _LAST_PORT = 10240, 65535
"""Of those that `free_port` draws from: above most well-known services."""
_TRIES = 100
_TCP = re.compile(r"^tcp://(?P<host>\[[^\]]+\]|[^:\[\]]+):(?P<port>\d+)$")


class BindError(ValueError):
    """An endpoint that cannot be bound; the message names the setting to change."""


class InsecureBindError(BindError):
    """A public address without encryption."""


class PortInUseError(BindError):
    """Somebody else listens there."""


def bind(sock: zmq.Socket, endpoint: str, *, setting: str, private: bool = False) -> str:
    """Bind `sock` and return the endpoint with its actual port (port 0 takes a free one).

    `private`: the socket has keys, or the user accepts a public address without them. `setting` names the
    configuration key of the port in error messages. Raises BindError.
    """
    host, port = split_endpoint(endpoint)
    section = setting.rpartition(".")[0]
    prefix = f"{section}." if section else ""
    address = _resolve(host, endpoint, f"{prefix}host")
    if not private and not is_loopback(address):
        raise InsecureBindError(public_without_keys(endpoint, prefix))
    is_ipv6 = ":" in address
    if is_ipv6:
        sock.setsockopt(zmq.IPV6, 1)
    numeric = f"tcp://[{address}]:{port}" if is_ipv6 else f"tcp://{address}:{port}"
    try:
        sock.bind(numeric)
    except zmq.ZMQError as problem:
        if problem.errno == errno.EADDRINUSE:
            raise PortInUseError(
                f"{endpoint}: another process listens on port {port}. Stop it, or set {setting} "
                "to another port (0 picks a free one)"
            ) from problem
        raise BindError(
            f"cannot listen on {endpoint}: {problem}. Set {prefix}host to an address of this machine "
            f"and {setting} to a port that you may use"
        ) from problem
    return sock.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")


def check_dial(endpoint: str, *, prefix: str = "network.") -> None:
    """Raises InsecureBindError unless a peer without keys may dial this: tickets decide what a server runs.

    A name that is not known yet (the learner's machine may start later) counts as another machine.
    """
    host, _ = split_endpoint(endpoint)
    try:
        address = _resolve(host, endpoint, f"{prefix}host")
    except BindError:
        address = ""
    if not is_loopback(address):
        raise InsecureBindError(public_without_keys(endpoint, prefix))


def is_loopback(address: str) -> bool:
    """Of a numeric address. A wildcard is not: it listens on every interface."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def public_without_keys(endpoint: str, prefix: str) -> str:
    return (
        f"{endpoint} is not this machine's loopback, and without keys the traffic is neither encrypted nor "
        f"authenticated. Make keys with `asyncrl keys DIR` and set {prefix}keys_dir=DIR on both sides, set "
        f"{prefix}host=127.0.0.1, or {prefix}insecure=true on a network that you trust"
    )


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """Host and port of `tcp://host:port`; raises BindError for anything else."""
    match = _TCP.match(endpoint)
    if match is None or int(match["port"]) > 65535:
        raise BindError(f"{endpoint!r} is not an endpoint. Write it as tcp://127.0.0.1:7601")
    return match["host"].strip("[]"), int(match["port"])


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that was free a moment ago and is still so for a process that starts again.

    Drawn from below the ports that the system gives to outgoing connections: one of those may be taken while its owner
    is away, even by a peer that keeps dialling it and so meets itself. To be safe from races bind port 0.
    """
    ports = range(_FIRST_PORT, _first_ephemeral_port())
    for _ in range(_TRIES):
        port = random.SystemRandom().choice(ports)
        if port_is_free(host, port):
            return port
    raise BindError(f"no free port among {_TRIES} of {ports.start} to {ports.stop - 1} on {host}")


def _first_ephemeral_port() -> int:
    try:
        first = int(_EPHEMERAL_PORTS.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return _USUAL_EPHEMERAL_PORT
    return first if first > _FIRST_PORT + _TRIES else _LAST_PORT + 1


def port_is_free(host: str, port: int) -> bool:
    """Could somebody listen on it now? Binding remains the only proof."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def host_id(directory: Path = SHARED_MEMORY) -> str:
    """Equal for two processes that can share files in `directory`: one kernel boot, one file system.

    Two containers on one machine differ unless they share the directory. Where there is no such
    directory the answer is unique, hence equal to nobody's.
    """
    try:
        boot_id = _BOOT_ID.read_text().strip()
        device = os.stat(directory).st_dev
    except OSError:
        return f"unshared:{uuid.uuid4().hex}"
    return f"{boot_id}:{device}"


def _resolve(host: str, endpoint: str, setting: str) -> str:
    if host == "*":
        return "0.0.0.0"
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except socket.gaierror as problem:
        raise BindError(
            f"{endpoint}: {host!r} is not a known address ({problem.strerror}). Set {setting} to an IP address"
        ) from problem
    addresses = [str(entry[4][0]) for entry in found]
    # "localhost" may stand for ::1 and 127.0.0.1: peers dial the latter.
    return next((address for address in addresses if ":" not in address), addresses[0])
