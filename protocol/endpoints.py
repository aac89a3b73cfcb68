"""Addresses that sockets may bind or dial, and the identity of a host whose processes share memory."""

from __future__ import annotations

import errno
import ipaddress
import os
import re
import socket
import uuid
from pathlib import Path

import zmq

SHARED_MEMORY = Path("/dev/shm")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_TCP = re.compile(r"^tcp://(?P<host>\[[^\]]+\]|[^:\[\]]+):(?P<port>\d+)$")


class BindError(ValueError):
    """An endpoint that cannot be bound; the message names the setting to change."""


class InsecureBindError(BindError):
    """A public address without encryption."""


class PortInUseError(BindError):
    """Another process listens there."""


class AddressError(BindError):
    """No port of this address can be bound here: its name is unknown, or it is another machine's."""


def bind(sock: zmq.Socket, endpoint: str, *, setting: str, private: bool = False) -> str:
    """Bind `sock` and return the endpoint with its actual port (port 0 takes a free one).

    `private`: the socket has keys, or the user accepts a public address without them. `setting` names the
    configuration key of the port in error messages. Raises BindError.
    """
    host, port = split_endpoint(endpoint)
    address = _resolve(host, _host_setting(setting))
    if not private and not is_loopback(address):
        raise InsecureBindError(public_without_keys(endpoint))
    is_ipv6 = ":" in address
    sock.setsockopt(zmq.IPV6, int(is_ipv6))
    try:
        sock.bind(f"tcp://[{address}]:{port}" if is_ipv6 else f"tcp://{address}:{port}")
    except zmq.ZMQError as problem:
        raise _bind_error(problem, host, port, setting) from problem
    return sock.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")


def check_dial(endpoint: str) -> None:
    """Raise InsecureBindError unless a peer without keys may dial this: tickets decide what a server runs.

    A name that is not known yet (the learner's machine may start later) counts as another machine.
    """
    host, _ = split_endpoint(endpoint)
    try:
        address = _resolve(host, "network.host")
    except BindError:
        address = ""
    if not is_loopback(address):
        raise InsecureBindError(public_without_keys(endpoint))


def is_loopback(address: str) -> bool:
    """True for a numeric loopback address. A wildcard is not loopback: it listens on every interface."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def public_without_keys(endpoint: str) -> str:
    """The error message for a public address without keys."""
    return (
        f"{endpoint} is not this machine's loopback, and without keys the traffic is neither encrypted nor "
        f"authenticated. Make keys with `asyncrl keys DIR` and set network.keys_dir=DIR on both sides, set "
        "network.host=127.0.0.1, or network.insecure=true on a network that you trust"
    )


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """Host and port of `tcp://host:port`; raises BindError for anything else."""
    match = _TCP.match(endpoint)
    if match is None or int(match["port"]) > 65535:
        raise BindError(f"{endpoint!r} is not an endpoint. Write it as tcp://127.0.0.1:7601")
    return match["host"].strip("[]"), int(match["port"])


def check_bind(host: str, port: int, *, setting: str) -> None:
    """Raise the BindError that binding would raise now (port 0: host only); binding itself may still fail later."""
    address = _resolve(host, _host_setting(setting))
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((address, port))
    except OSError as problem:
        raise _bind_error(problem, host, port, setting) from problem


def _bind_error(problem: OSError | zmq.ZMQError, host: str, port: int, setting: str) -> BindError:
    """Translate the system's error into one that names the setting to change."""
    host_setting = _host_setting(setting)
    if problem.errno == errno.EADDRINUSE:
        return PortInUseError(
            f"port {port} on {host} is in use by another process. Stop it, or set {setting} to another port (0 takes "
            "a free one)"
        )
    if problem.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.ENODEV):
        return AddressError(
            f"{host_setting} is {host}, which is no address of this machine. Set {host_setting} to one that it has: "
            "127.0.0.1, or 0.0.0.0 for all of them"
        )
    return BindError(
        f"cannot listen on port {port} of {host}: {problem.strerror}. Set {host_setting} to an address of this "
        f"machine and {setting} to a port that you may use"
    )


def _host_setting(setting: str) -> str:
    """The host key of the same section: `network.control_port` -> `network.host`."""
    return f"{setting.rpartition('.')[0]}.host".lstrip(".")


def address_towards(endpoint: str) -> str:
    """Address of this machine as the machine of `endpoint` sees it, where no one translates addresses.

    Raises BindError for an unknown host, or where there is no route.
    """
    host, port = split_endpoint(endpoint)
    address = _resolve(host, "network.host")
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:  # connecting it sends nothing
            probe.connect((address, port))
            return str(probe.getsockname()[0])
    except OSError as problem:
        raise BindError(f"there is no way from here to {endpoint}: {problem.strerror}") from problem


def endpoint_of(address: str, port: int) -> str:
    """`tcp://address:port`, with brackets around an IPv6 address."""
    return f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"


def host_id(directory: Path = SHARED_MEMORY) -> str:
    """An id equal for two processes that can share files in `directory`: one kernel boot, one file system.

    Two containers on one machine differ unless they share the directory. Where there is no such
    directory the answer is unique, hence equal to no other.
    """
    try:
        boot_id = _BOOT_ID.read_text(encoding="utf-8").strip()
        device = os.stat(directory).st_dev
    except OSError:
        return f"unshared:{uuid.uuid4().hex}"
    return f"{boot_id}:{device}"


def _resolve(host: str, setting: str) -> str:
    if host == "*":
        return "0.0.0.0"
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as problem:
        why = problem.strerror if isinstance(problem, OSError) else "not a host name"
        raise AddressError(
            f"{setting} is {host!r}, which is not a known address here ({why}). Set {setting} to an IP address"
        ) from problem
    addresses = [str(entry[4][0]) for entry in found]
    # "localhost" may stand for ::1 and 127.0.0.1: peers dial the latter.
    return next((address for address in addresses if ":" not in address), addresses[0])
