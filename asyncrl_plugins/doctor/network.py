"""Ports, addresses and their keys, and whether a learner on another machine answers."""

from __future__ import annotations

import socket
from pathlib import Path

import psutil

from asyncrl.config.schema import RunConfig, changed
from asyncrl.launch.ports import fixed_ports, may_move, reserve_ports
from asyncrl_plugins.doctor.findings import Finding, Findings, problem
from protocol.curve import LEARNER_SECRET, SERVER_SECRET, KeyFileError, read_learner_keys, read_server_keys
from protocol.endpoints import BindError, check_bind, public_without_keys

ANSWER_S = 3.0


def find_ports(config: RunConfig) -> Findings[None]:
    """Reserves the ports for a moment, as a launcher does: without the learner's, where it is another machine."""
    if not is_local(config.network.host):
        there = {"network.control_port": 0, "network.weights_port": 0}
        config = changed(config, {"network.host": "127.0.0.1", **there})
    connections = psutil.net_connections(kind="tcp")
    holders = {one.laddr.port: one.pid for one in connections if one.laddr and one.status == psutil.CONN_LISTEN}
    for name, setting, host, port in fixed_ports(config):
        if holder := holders.get(port):  # None, too, for a process that this user cannot see
            value = f"port {port} ({name}) on {host} is held by {psutil.Process(holder).name()} (process {holder})"
            section, _, key = setting.partition(".")
            if may_move(getattr(config, section), key):
                yield Finding("ports", f"{value}: `asyncrl train` takes another one", "note")
                continue
            fix = f"stop that process, or set {setting} to another port, or to 0, which takes a free one"
            yield Finding("ports", value, "problem", fix)
            return
    with reserve_ports(config) as resolved:
        there = {port for *_, port in fixed_ports(resolved)}
    fixed = ", ".join(str(port) for *_, port in fixed_ports(config) if port in there)
    yield Finding("ports", f"free: {fixed or 'all are chosen when the run starts'}")


def find_network(config: RunConfig) -> Findings[None]:
    network = config.network
    if network.keys_dir:
        yield from _keys(Path(network.keys_dir))
    elif not config.network.is_open:
        yield problem("network", ValueError(public_without_keys(config.network.control_endpoint)))
    else:
        how = "unencrypted (network.insecure)" if network.insecure else "this machine alone"
        yield Finding("network", f"{network.host}: {how}")
    if not is_local(network.host):
        yield from _learner(config)


def _keys(folder: Path) -> Findings[None]:
    """Check the key files present on this machine: the learner's, a server's, or both."""
    sides = {LEARNER_SECRET: ("the learner's", read_learner_keys), SERVER_SECRET: ("a server's", read_server_keys)}
    here = {secret: side for secret, side in sides.items() if (folder / secret).is_file()} or sides
    for name, read in here.values():
        try:
            read(folder)
            yield Finding("keys", f"{folder} has {name}")
        except KeyFileError as error:
            yield problem("keys", error)


def _learner(config: RunConfig) -> Findings[None]:
    """Check that the learner's ports accept connections."""
    network = config.network
    for port in (network.control_port, network.weights_port):
        try:
            socket.create_connection((network.host, port), timeout=ANSWER_S).close()
            yield Finding("learner", f"{network.host}:{port} answers")
        except (OSError, UnicodeError) as error:
            value = f"network.host is {network.host}, another machine, and port {port} does not answer: {error}"
            fix = "start the learner there first (asyncrl learn), open the port in between, or set another host"
            yield Finding("learner", value, "warning", fix)


def is_local(host: str) -> bool:
    """True if a socket can be bound to the host here."""
    try:
        check_bind(host, 0, setting="network.port")
    except BindError:
        return False
    return True
