"""Overlays: a few keys in a YAML file, laid over a configuration. One ships for each algorithm (docs/algorithms.md)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from asyncrl.config.keys import all_keys
from asyncrl.config.suggest import did_you_mean
from asyncrl.errors import UserError

FOLDER = Path(__file__).parents[1] / "algorithms" / "overlays"
Place = tuple[str | int, ...]
"""A place in a configuration: names of keys and indices of list items."""


@cache
def shipped_overlays() -> Mapping[str, Path]:
    """Overlays of the algorithms, by name."""
    return {file.stem: file for file in sorted(FOLDER.glob("*.yaml"))}


def find_overlay(word: str) -> Path:
    """The file of an overlay, from its path or from the name of one that ships. UserError for anything else."""
    if word.endswith((".yaml", ".yml")):
        return Path(word)
    if word in shipped_overlays():
        return shipped_overlays()[word]
    raise UserError(
        f"override {word!r} has no `=`: expected key=value, such as batch.group_size=8, or an overlay: a YAML file or "
        f"the name of an algorithm.{did_you_mean(word, shipped_overlays())} There are {', '.join(shipped_overlays())}"
    )


def leaves(value: Any, place: Place = ()) -> Iterator[tuple[Place, Any]]:
    """Yield each key that an overlay gives, with its value: a mapping that is itself a setting, and a list, whole."""
    is_key = ".".join(map(str, place)) in all_keys()
    if isinstance(value, dict) and not is_key:
        for name, inner in value.items():
            yield from leaves(inner, (*place, name))
    elif value is not None or is_key:  # an empty section changes nothing
        yield place, value
