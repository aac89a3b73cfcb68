"""The schema seen as dotted keys (`learner.optim.lr`).

In key paths an item of a list is written `N`: `reward.functions.N.weight`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from asyncrl.config.schema import RunConfig
from asyncrl.config.sections import OpenSection
from asyncrl.errors import close_names

REQUIRED: Any = PydanticUndefined
"""Default of a key that has none."""

_BOUNDS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
_SCALARS: dict[Any, str] = {str: "text", int: "whole number", float: "number", bool: "true or false", Any: "anything"}


@dataclass(frozen=True)
class Key:
    """One setting: a leaf of the schema, or a list of sections."""

    path: str
    field: FieldInfo
    plugin: str = ""
    """Package of the plug-in whose section has the key; empty for the core."""

    @property
    def default(self) -> Any:
        """The value of a key that is left out; REQUIRED if it must be given."""
        return self.field.get_default(call_default_factory=True)

    @property
    def text(self) -> str:
        """The docstring of the field."""
        return (self.field.description or "").strip()

    @property
    def is_list(self) -> bool:
        """Whether its value is a list of any length."""
        return get_origin(self.field.annotation) is tuple and get_args(self.field.annotation)[-1] is Ellipsis

    @property
    def type_text(self) -> str:
        """Values that are accepted, in words: `whole number > 0`."""
        bounds = [
            f"{sign} {getattr(bound, name)}"
            for bound in self.field.metadata
            for name, sign in _BOUNDS.items()
            if hasattr(bound, name)
        ]
        return " ".join([_in_words(self.field.annotation), " and ".join(bounds)]).strip()


_OWN_WORDS = ("algorithm", "environment")
"""Sections in which plug-ins and classes have words of their own: keys elsewhere are not meant."""


@cache
def all_keys() -> dict[str, Key]:
    """Every setting by its path, in the order of the schema."""
    return {key.path: key for key in _keys_below(RunConfig, "")}


def similar_keys(path: str, unchosen: Collection[str] = ()) -> list[str]:
    """Keys with a last name like that of `path`: up to three of the same section, its sub-sections among them, else the
    best of another one. Keys in `unchosen` sections only where no other is similar. In a section that there is not, the
    section that may be meant. Where no name is similar, keys whose descriptions have the words (learning_rate: lr)."""
    section, _, wanted = path.rpartition(".")
    while section and not any(key.startswith(f"{section}.") for key in all_keys()):
        section, _, wanted = section.rpartition(".")
    hidden = tuple(f"{each}." for each in unchosen)
    top, last = path.partition(".")[0], path.rpartition(".")[2]
    for keys in ([key for key in all_keys() if not key.startswith(hidden)], list(all_keys())):
        inside = [key.removeprefix(f"{section}.") for key in keys if key.startswith(f"{section}.")]
        below = {key.replace(".", "_"): f"{section}.{key}" for key in inside}
        below |= {key.partition(".")[0]: f"{section}.{key.partition('.')[0]}" for key in inside if "." in key}
        if close := [below[name] for name in close_names(wanted, below, at_most=3)]:
            return close
        others = [key for key in reversed(keys) if top not in _OWN_WORDS or key.startswith(f"{top}.")]
        elsewhere = {key.rpartition(".")[2]: key for key in others}
        if close := [elsewhere[name] for name in close_names(last, elsewhere, at_most=1)]:
            return close
    words = last.replace("_", " ").lower()
    described = [path for path, key in all_keys().items() if words in key.text.lower()] if " " in words else []
    inside = [path for path in described if path.startswith(f"{top}.")]
    return sorted(inside or described, key=lambda path: path.startswith(hidden))[:3]


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The section class that the annotation names, or None for anything else."""
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _keys_below(section: type[BaseModel], prefix: str, plugin: str = "") -> Iterator[Key]:
    for name, field in section.model_fields.items():
        path = prefix + name
        inner = section_of(field.annotation)
        if inner:
            yield from _keys_below(inner, path + ".", plugin)
            continue
        yield Key(path, field, plugin)
        item = section_of(get_args(field.annotation)[0]) if get_origin(field.annotation) is tuple else None
        if item:
            yield from _keys_below(item, f"{path}.N.", plugin)
    for name, inner in section.possible_sections().items() if issubclass(section, OpenSection) else ():
        yield from _keys_below(inner, f"{prefix}{name}.", plugin or _plugin_of(inner))


def _plugin_of(section: type[BaseModel]) -> str:
    """Package that brings the section: `asyncrl_plugins.NAME`, or a third party's; empty for the core."""
    package, _, below = section.__module__.partition(".")
    own = f"{package}.{below.partition('.')[0]}" if package == "asyncrl_plugins" else package
    return "" if package == "asyncrl" else own


def _in_words(annotation: Any) -> str:
    """Describe a type in words: `list of text`."""
    if annotation in _SCALARS:
        return _SCALARS[annotation]
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return "one of " + ", ".join(str(a) for a in arguments)
    if origin is tuple:
        many = "of" if arguments[-1] is Ellipsis else f"{len(arguments)} of"
        return f"list {many} {_in_words(arguments[0])}"
    if origin in (Union, UnionType):
        return " or ".join("nothing" if a is NoneType else _in_words(a) for a in arguments)
    return "mapping"
