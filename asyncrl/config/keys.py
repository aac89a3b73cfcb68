"""The schema seen as dotted keys (`learner.optim.lr`), and the reference page that lists them.

In key paths an item of a list is written `N`: `reward.functions.N.weight`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from asyncrl.config.algorithm import AlgorithmConfig
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


@cache
def all_keys() -> dict[str, Key]:
    """Every setting by its path, in the order of the schema."""
    return {key.path: key for key in _keys_below(RunConfig, "")}


def similar_keys(path: str, unchosen: Collection[str] = ()) -> list[str]:
    """Keys with a last name like that of `path`: up to three of the same section, else the best of another one. Keys in
    `unchosen` sections only where no other is similar."""
    section, _, wanted = path.rpartition(".")
    hidden = tuple(f"{each}." for each in unchosen)
    for keys in ([key for key in all_keys() if not key.startswith(hidden)], list(all_keys())):
        inside = (key for key in keys if key.startswith(f"{section}."))
        below = {key.removeprefix(f"{section}.").replace(".", "_"): key for key in inside}
        elsewhere = {key.rpartition(".")[2]: key for key in reversed(keys)}
        close = [below[name] for name in close_names(wanted, below, at_most=3)]
        close = close or [elsewhere[name] for name in close_names(wanted, elsewhere, at_most=1)]
        if close:
            return close
    return []


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


REFERENCE = """# Configuration reference

Every key of the YAML file. On the command line any of them can be given as `key=value`; an item of a list has its \
index in place of `N`, as in `reward.functions.0.weight=2`, and `key+=value` adds an item or a list of them, as in \
`reward.functions+={function: format_think}`. Settings of one method, such as `algorithm.gae.lam`, exist only where \
it is chosen: they are listed with the methods ([algorithms](algorithms.md#settings)). Unknown keys are refused. \
Relative paths are relative to the directory in which the command runs.
"""
REPEATED = {
    "critic.optim": "`critic.optim` has the keys of [`learner.optim`](#learner); its `lr` is {lr} by default.",
    "sft.optim": "`sft.optim` has the keys of [`learner.optim`](#learner); its `lr` is {lr} by default.",
    "evaluation.limits": "`evaluation.limits` may have `turns`, `tokens`, `tokens_per_turn` and `images` of "
    "[`environment.limits`](#environment), for held-out rows. Engines make room for the larger number of tokens.",
}
"""Sections whose keys are listed elsewhere: a sentence in their place."""
TABLE_HEAD = ("| key | type | default | meaning |", "|---|---|---|---|")
INTERNAL = ("replaced",)
"""Keys that asyncrl itself writes."""


def core_reference() -> str:
    """Markdown: keys of the core that every run has, one table per section of the file, whatever is installed."""
    return "\n".join([REFERENCE, *key_tables(keys_of(""))])


def method_settings() -> str:
    """Markdown: a table of the settings of the core's methods."""
    return "\n".join([*TABLE_HEAD, *map(_row, _of_methods(all_keys().values()))])


def config_reference() -> str:
    """Markdown: every key of the core, then those of each installed plug-in."""
    plugins = {key.plugin: None for key in all_keys().values() if key.plugin}
    lines = (line for plugin in plugins for line in ("# Plug-in " + plugin + "\n", *key_tables(keys_of(plugin))))
    return "\n".join([core_reference(), "# Settings of methods\n", method_settings(), "", *lines])


def keys_of(plugin: str) -> list[Key]:
    """Keys of a plug-in's own sections, by its package; of the core without its methods' for an empty name."""
    left_out = {*INTERNAL, *(key.path for key in _of_methods(all_keys().values()))}
    return [key for key in all_keys().values() if key.plugin == plugin and key.path not in left_out]


def _of_methods(keys: Iterable[Key]) -> Iterator[Key]:
    """Settings of the core's methods: keys of sections that exist only where a method is chosen."""
    sections = tuple(f"algorithm.{name}." for name in AlgorithmConfig.possible_sections())
    yield from (key for key in keys if not key.plugin and key.path.startswith(sections))


def key_tables(keys: Iterable[Key]) -> Iterator[str]:
    """Yield lines of Markdown: keys with type, default and meaning, one table per section of the file."""
    for section, group in groupby(keys, key=lambda key: key.path.partition(".")[0]):
        repeated = {each: text for each, text in REPEATED.items() if each.startswith(f"{section}.")}
        section_class = section_of(RunConfig.model_fields[section].annotation)
        introduction = section_class.__dict__.get("__doc__") if section_class else None
        yield f"## {section}\n"
        yield from [introduction.strip() + "\n"] if introduction else []
        yield from TABLE_HEAD
        for key in group:
            if key.path.rpartition(".")[0] in repeated:
                continue
            yield _row(key)
        yield ""
        for each, text in repeated.items():
            lr = all_keys().get(f"{each}.lr")
            yield text.format(lr=lr and lr.default) + "\n"


def _row(key: Key) -> str:
    default = "required" if key.default is REQUIRED else f"`{_default_text(key.default)}`"
    cells = (f"`{key.path}`", key.type_text, default, " ".join(key.text.split()))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _default_text(default: object) -> str:
    """The default as it would be written in the file."""
    return default if isinstance(default, str) and default else json.dumps(default)
