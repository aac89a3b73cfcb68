"""The ports of a launched run: a fixed one must be free, a zero becomes a free one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from asyncrl.config.schema import RunConfig
from asyncrl.errors import UserError
from asyncrl.launch.drawn_ports import claim_port, draw_ports
from protocol.endpoints import BindError, check_bind

PORTS = (
    ("network", "control_port"),
    ("network", "weights_port"),
    ("telemetry", "learner_port"),
    ("telemetry", "rollout_port"),
)


@contextmanager
def reserve_ports(config: RunConfig) -> Iterator[RunConfig]:
    """The configuration without zeros. Until the end no other launcher takes one of its ports. Raises UserError."""
    sections: dict[str, dict[str, int]] = {"network": {}, "telemetry": {}}
    with ExitStack() as kept:
        try:
            _claim_fixed_ports(config, kept)
            for section, key in PORTS:
                fixed, host = getattr(getattr(config, section), key), getattr(config, section).host
                sections[section][key] = fixed or draw_ports(host, _num_ports(config, key), kept)
        except BindError as error:
            raise UserError(str(error)) from None
        yield config.model_copy(
            update={name: getattr(config, name).model_copy(update=ports) for name, ports in sections.items()}
        )


def _claim_fixed_ports(config: RunConfig, kept: ExitStack) -> None:
    """A port that was asked for must be free, and asked for once; each host is an address of this machine."""
    for section, key in PORTS:
        check_bind(getattr(config, section).host, 0, setting=f"{section}.{key}")
    owners: dict[int, str] = {}
    for name, setting, host, port in fixed_ports(config):
        if port in owners:
            raise UserError(f"{owners[port]} and {name} are both {port}. Set one of them to 0 or another port")
        check_bind(host, port, setting=setting)
        claim_port(port, kept, setting=setting)
        owners[port] = name


def _num_ports(config: RunConfig, key: str) -> int:
    return config.rollout.servers if key == "rollout_port" else 1


def fixed_ports(config: RunConfig) -> Iterator[tuple[str, str, str, int]]:
    """Whose each port is, the setting that names it, its address and its number; those that are 0 are left out."""
    for section, key in PORTS:
        host, first = getattr(config, section).host, getattr(getattr(config, section), key)
        for port in range(first, first + _num_ports(config, key)) if first else ():
            name = f"{section}.{key}" + (f" + {port - first} (rollout.servers)" if port > first else "")
            yield name, f"{section}.{key}", host, port
