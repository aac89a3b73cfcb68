"""Other values of a configuration that is checked already."""

from __future__ import annotations

from collections.abc import Mapping

from asyncrl.config.schema import RunConfig


def changed(config: RunConfig, changes: Mapping[str, object]) -> RunConfig:
    """The configuration with other values at these dotted keys; not checked again."""
    for key, value in changes.items():
        config = _changed(config, key.split("."), value)
    return config


def _changed(section: object, path: list[str], value: object):  # any section of the configuration
    name, *rest = path
    inner = _changed(getattr(section, name), rest, value) if rest else value
    return section.model_copy(update={name: inner})  # pyright: ignore[reportAttributeAccessIssue]
