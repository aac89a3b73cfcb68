"""May the address be used as it is, with its keys, and does a learner answer where it is another machine's?"""

from __future__ import annotations

import socket
from pathlib import Path

from asyncrl.config.device_rules import network_is_open
from asyncrl.config.schema import RunConfig
from asyncrl.tools.doctor.findings import Finding, Findings, problem
from protocol.curve import LEARNER_SECRET, SERVER_SECRET, KeyFileError, read_learner_keys, read_server_keys
from protocol.endpoints import BindError, check_bind, public_without_keys

ANSWER_S = 3.0


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
    """A machine has the learner's keys, a server's, or both; what is there must be whole."""
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
        why = error.strerror if isinstance(error, OSError) else error
        fix = "set it to an IP address, or to a name that this machine knows; in compose both services join one network"
        yield Finding("learner", f"network.host is {network.host}, which has no address here: {why}", "warning", fix)
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
    """Somebody can listen on it here."""
    try:
        check_bind(host, 0, setting="network.port")
    except BindError:
        return False
    return True
