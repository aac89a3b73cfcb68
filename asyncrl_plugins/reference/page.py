"""Configuration keys as Markdown: tables of the core's, of its methods' and of installed plug-ins' keys."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from itertools import groupby

from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.keys import REQUIRED, Key, all_keys, section_of
from asyncrl.config.schema import RunConfig

REFERENCE = """# Configuration reference

Every key of the YAML file. On the command line any of them can be given as `key=value`; an item of a list has its \
index in place of `N`, as in `reward.functions.0.weight=2`, and `key+=value` adds an item or a list of them, as in \
`reward.functions+={function: format_think}`. Settings of one method, such as `algorithm.gae.lam`, exist only where \
it is chosen: they are listed with the methods ([algorithms](algorithms.md#settings)). Unknown keys are refused. \
Relative paths are relative to the directory in which the command runs.
"""
REPEATED = {
    "critic.optim": "`critic.optim` has the keys of [`learner.optim`](#learner); its `lr` is {lr} by default.",
    "sft.optim": "`sft.optim` has the keys of `learner.optim`; its `lr` is {lr} by default.",
    "evaluation.limits": "`evaluation.limits` may have `turns`, `tokens`, `tokens_per_turn` and `images` of "
    "[`environment.limits`](#environment), for held-out rows. Engines make room for the larger number of tokens.",
}
"""Sections whose keys are listed elsewhere: a sentence in their place."""
TABLE_HEAD = ("| key | type | default | meaning |", "|---|---|---|---|")
INTERNAL = ("replaced",)
"""Keys that asyncrl itself writes."""


def print_reference(arguments: argparse.Namespace) -> int:
    """`asyncrl config-reference`."""
    print(config_reference())
    return 0


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
        field = RunConfig.model_fields.get(section)
        section_class = section_of(field.annotation) if field else RunConfig.possible_sections().get(section)
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
