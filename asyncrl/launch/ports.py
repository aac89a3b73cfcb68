"""The ports of a launched run: a fixed one must be free, a zero becomes one that is kept for the run's services."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from asyncrl.config.schema import RunConfig
from asyncrl.errors import UserError
from protocol.endpoints import BindError, check_bind, kept_ports

PORTS = (
    ("network", "control_port"),
    ("network", "weights_port"),
    ("telemetry", "learner_port"),
    ("telemetry", "rollout_port"),
)


@contextmanager
def reserve_ports(config: RunConfig) -> Iterator[RunConfig]:
    """The configuration without zeros. What they became is this run's, its restarts included, until the end."""
    _check_fixed_ports(config)
    fixed = {port for *_, port in fixed_ports(config)}
    sections: dict[str, dict[str, int]] = {"network": {}, "telemetry": {}}
    with ExitStack() as kept:
        for section, key in PORTS:
            port = getattr(getattr(config, section), key)
            sections[section][key] = port or _reserve(config, section, key, fixed, kept)
        yield config.model_copy(
            update={name: getattr(config, name).model_copy(update=ports) for name, ports in sections.items()}
        )


def _reserve(config: RunConfig, section: str, key: str, fixed: set[int], kept: ExitStack) -> int:
    """The first of as many as there are services."""
    count, host = _num_ports(config, key), getattr(config, section).host
    while True:
        with ExitStack() as drawn:
            try:
                first = drawn.enter_context(kept_ports(host, count))
            except BindError as error:
                raise UserError(str(error)) from None
            if fixed.isdisjoint(range(first, first + count)):
                kept.push(drawn.pop_all())
                return first


def _num_ports(config: RunConfig, key: str) -> int:
    return config.rollout.servers if key == "rollout_port" else 1


def _check_fixed_ports(config: RunConfig) -> None:
    """A port that was asked for must be free, and asked for once; each host is an address of this machine."""
    for section, key in PORTS:
        _check_bind(getattr(config, section).host, 0, f"{section}.{key}")
    owners: dict[int, str] = {}
    for name, setting, host, port in fixed_ports(config):
        if port in owners:
            raise UserError(f"{owners[port]} and {name} are both {port}. Set one of them to 0 or another port")
        _check_bind(host, port, setting)
        owners[port] = name


def _check_bind(host: str, port: int, setting: str) -> None:
    try:
        check_bind(host, port, setting=setting)
    except BindError as error:
        raise UserError(str(error)) from None


def fixed_ports(config: RunConfig) -> Iterator[tuple[str, str, str, int]]:
    """Whose each port is, the setting that names it, its address and its number; those that are 0 are left out."""
    for section, key in PORTS:
        host, first = getattr(config, section).host, getattr(getattr(config, section), key)
        for port in range(first, first + _num_ports(config, key)) if first else ():
            name = f"{section}.{key}" + (f" + {port - first} (rollout.servers)" if port > first else "")
            yield name, f"{section}.{key}", host, port
