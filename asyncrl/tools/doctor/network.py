"""Ports that are taken, addresses and their keys, and whether a learner on another machine answers."""

from __future__ import annotations

import socket
from pathlib import Path

import psutil

from asyncrl.config.device_rules import network_is_open
from asyncrl.config.schema import RunConfig
from asyncrl.launch.ports import PORTS, fixed_ports, is_claimed
from asyncrl.tools.doctor.findings import Finding, Findings, problem
from protocol.curve import LEARNER_SECRET, SERVER_SECRET, KeyFileError, read_learner_keys, read_server_keys
from protocol.endpoints import AddressError, BindError, PortInUseError, check_bind, public_without_keys

ANSWER_S = 3.0


def find_ports(config: RunConfig) -> Findings[None]:
    other_machines = set()  # network.host may be the learner's machine: see find_network
    for host, setting in ((config.network.host, ""), (config.telemetry.host, "telemetry.port")):
        try:
            check_bind(host, 0, setting=setting)
        except AddressError as error:
            other_machines.add(host)
            if setting:
                yield problem("telemetry.host", error)
    owners: dict[int, str] = {}
    free: list[str] = []
    for name, setting, host, port in fixed_ports(config):
        another = f"set {setting} to another port, or to 0"
        try:
            if port in owners:
                yield Finding("ports", f"{owners[port]} and {name} are both {port}", "problem", another)
            elif host not in other_machines:
                check_bind(host, port, setting=setting)
                if is_claimed(port):
                    value = f"port {port} ({name}) is kept for a run that was started on this machine"
                    yield Finding("ports", value, "problem", f"stop that run, or {another}")
                else:
                    free.append(str(port))
        except PortInUseError:
            value = f"port {port} ({name}) on {host} is held by {_holder(port)}"
            yield Finding("ports", value, "problem", f"stop that process, or {another}, which takes a free one")
        except BindError as error:
            yield problem("ports", error)
        owners.setdefault(port, name)
    if free:
        yield Finding("ports", f"{', '.join(free)} {'are' if len(free) > 1 else 'is'} free")
    chosen = [f"{section}.{key}" for section, key in PORTS if not getattr(getattr(config, section), key)]
    if chosen:
        yield Finding("ports", f"chosen when the run starts: {', '.join(chosen)}", "note")


def _holder(port: int) -> str:
    """The process that listens on the port, as far as this user may see."""
    try:
        listening = (one for one in psutil.net_connections(kind="tcp") if one.status == psutil.CONN_LISTEN)
        process = next(one.pid for one in listening if one.laddr and one.laddr.port == port and one.pid)
        return f"{psutil.Process(process).name()} (process {process})"
    except (StopIteration, psutil.Error):
        return "another process, which this user cannot see"


def find_network(config: RunConfig) -> Findings[None]:
    network = config.network
    if network.keys_dir:
        yield from _keys(Path(network.keys_dir))
    elif not network_is_open(config):
        yield problem("network", ValueError(public_without_keys(config.control_endpoint, "network.")))
    else:
        how = "unencrypted (network.insecure)" if network.insecure else "this machine alone"
        yield Finding("network", f"{network.host}: {how}")
    if not is_local(network.host):
        yield from _learner(config)


def _keys(folder: Path) -> Findings[None]:
    """A machine has the learner's keys, a server's, or both; what it has must be whole."""
    sides = {LEARNER_SECRET: ("the learner's", read_learner_keys), SERVER_SECRET: ("a server's", read_server_keys)}
    here = {secret: side for secret, side in sides.items() if (folder / secret).is_file()} or sides
    for name, read in here.values():
        try:
            read(folder)
            yield Finding("keys", f"{folder} has {name}")
        except KeyFileError as error:
            yield problem("keys", error)


def _learner(config: RunConfig) -> Findings[None]:
    network = config.network
    try:
        socket.getaddrinfo(network.host, None)
    except (OSError, UnicodeError) as error:
        fix = "set it to an IP address, or to a name that this machine knows; in compose both services join one network"
        yield Finding("learner", f"network.host is {network.host}, which has no address here: {error}", "warning", fix)
        return
    for port in (network.control_port, network.weights_port):
        try:
            socket.create_connection((network.host, port), timeout=ANSWER_S).close()
            yield Finding("learner", f"{network.host}:{port} answers")
        except OSError as error:
            value = f"{network.host} is another machine, and nobody answers at port {port}: {error}"
            fix = "start the learner there first (asyncrl learn), and open the port in between"
            yield Finding("learner", value, "warning", fix)


def is_local(host: str) -> bool:
    """A program can listen on it here."""
    try:
        check_bind(host, 0, setting="network.port")
    except BindError:
        return False
    return True
