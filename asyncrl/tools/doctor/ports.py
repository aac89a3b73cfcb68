"""Are the ports of the configuration free, and who holds those that are not?"""

from __future__ import annotations

import psutil

from asyncrl.config.schema import RunConfig
from asyncrl.launch.drawn_ports import is_claimed
from asyncrl.launch.ports import PORTS, fixed_ports
from asyncrl.tools.doctor.findings import Finding, Findings, problem
from protocol.endpoints import AddressError, BindError, PortInUseError, check_bind


def find_ports(config: RunConfig) -> Findings[None]:
    elsewhere = yield from _hosts(config)
    owners: dict[int, str] = {}
    free: list[int] = []
    for name, setting, host, port in fixed_ports(config):
        try:
            if port in owners:
                fix = f"set {setting} to another port, or to 0"
                yield Finding("ports", f"{owners[port]} and {name} are both {port}", "problem", fix)
            elif host not in elsewhere:
                check_bind(host, port, setting=setting)
                if is_claimed(port):
                    value = f"port {port} ({name}) is kept for a run that was started on this machine"
                    yield Finding(
                        "ports", value, "problem", f"stop that run, or set {setting} to another port, or to 0"
                    )
                else:
                    free.append(port)
        except PortInUseError:
            value = f"port {port} ({name}) on {host} is held by {_holder(port)}"
            fix = f"stop that process, or set {setting} to another port (0 takes a free one)"
            yield Finding("ports", value, "problem", fix)
        except BindError as error:
            yield problem("ports", error)
        owners.setdefault(port, name)
    if free:
        yield Finding("ports", f"{', '.join(map(str, free))} are free" if len(free) > 1 else f"{free[0]} is free")
    chosen = [f"{section}.{key}" for section, key in PORTS if not getattr(getattr(config, section), key)]
    if chosen:
        yield Finding("ports", f"chosen when the run starts: {', '.join(chosen)}", "note")


def _hosts(config: RunConfig) -> Findings[set[str]]:
    """Those on which nobody can listen here. network.host may be the learner's machine: `find_network` looks at it."""
    elsewhere = set()
    for host, setting in ((config.network.host, ""), (config.telemetry.host, "telemetry.port")):
        try:
            check_bind(host, 0, setting=setting)
        except AddressError as error:
            elsewhere.add(host)
            if setting:
                yield problem("telemetry.host", error)
    return elsewhere


def _holder(port: int) -> str:
    """As far as this user may see."""
    try:
        connections = psutil.net_connections(kind="tcp")
    except psutil.AccessDenied:
        connections = []
    for one in connections:
        if one.status == psutil.CONN_LISTEN and one.laddr and one.laddr.port == port and one.pid:
            try:
                return f"{psutil.Process(one.pid).name()} (process {one.pid})"
            except psutil.Error:
                return f"process {one.pid}"
    return "another process, which this user cannot see"
