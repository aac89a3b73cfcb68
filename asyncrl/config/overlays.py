"""Overlays: a few keys in a YAML file, laid over a configuration. One ships for each algorithm (docs/algorithms.md);
plug-ins bring one for each task."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

from asyncrl.config.installed_methods import method_sets
from asyncrl.config.keys import all_keys
from asyncrl.errors import UserError, did_you_mean
from asyncrl.plugins import descriptions, what_to_install

Kind = Literal["algorithms", "tasks"]
Place = tuple[str | int, ...]
"""A place in a configuration: names of keys and indices of list items."""


@cache
def shipped_overlays(kind: Kind) -> Mapping[str, Path]:
    """Overlays of a kind, by name: those of the core first. No name is of two."""
    tasks = (each.overlays for each in descriptions("tasks").values())
    folders = (each.overlays for each in method_sets().values()) if kind == "algorithms" else tasks
    return {file.stem: file for folder in folders if folder for file in sorted(folder.glob("*.yaml"))}


def find_overlay(word: str) -> Path:
    """The file of an overlay, from its path or from the name of one that ships. UserError for anything else."""
    if word.endswith((".yaml", ".yml")):
        return Path(word)
    algorithms, tasks = shipped_overlays("algorithms"), shipped_overlays("tasks")
    named = {**algorithms, **tasks}
    if word in named:
        return named[word]
    raise UserError(
        f"override {word!r} has no `=`: expected key=value, such as batch.group_size=8, or an overlay: a YAML file or "
        f"the name of an algorithm or a task.{did_you_mean(word, named)} Algorithms are {', '.join(algorithms)}"
        + (f"; tasks are {', '.join(tasks)}" if tasks else f". Tasks are plug-ins. {what_to_install('tasks')}")
    )


def is_method(word: str) -> bool:
    """True for an algorithm's overlay that ships, by its name or its path."""
    algorithms = shipped_overlays("algorithms")
    return word in algorithms or Path(word).resolve() in algorithms.values()


def leaves(value: Any, place: Place = ()) -> Iterator[tuple[Place, Any]]:
    """Yield each key that an overlay gives, with its value: a mapping that is itself a setting, and a list, whole."""
    is_key = ".".join(map(str, place)) in all_keys()
    if isinstance(value, dict) and not is_key:
        for name, inner in value.items():
            yield from leaves(inner, (*place, name))
    elif value is not None or is_key:  # an empty section changes nothing
        yield place, value
