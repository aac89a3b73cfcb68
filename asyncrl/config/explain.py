"""Explain a configuration: the text of `--dry-run`, and the reference page of all keys."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import groupby

from asyncrl.config.algorithm import AlgorithmConfig, method_line
from asyncrl.config.installed_methods import chosen_hooks
from asyncrl.config.keys import REQUIRED, Key, all_keys, section_of
from asyncrl.config.load import dump_config
from asyncrl.config.schedules import schedule_notes
from asyncrl.config.schema import RunConfig

REFERENCE = """# Configuration reference

Every key of the YAML file. On the command line any of them can be given as `key=value`; an item of a list has its \
index in place of `N`, as in `reward.functions.0.weight=2`, and `key+=value` adds an item or a list of them, as in \
`reward.functions+={function: format_think}`. Settings of one method, such as `algorithm.gae.lam`, exist only where \
it is chosen: they are listed with the methods ([algorithms](algorithms.md#settings)). Unknown keys are refused. \
Relative paths are relative to the directory in which the command runs.
"""


def explain(config: RunConfig, num_rows: int) -> str:
    """The resolved configuration, its method in one line, schedules that the run is too short for, the three batch
    numbers and all that follows from them. Rows are those left after filtering."""
    batch, updates = config.batch, config.algorithm.updates_per_batch
    longest = config.data.max_prompt_length + config.data.max_response_length
    per_group = "group_size" if config.trajectories_per_group == batch.group_size else "(group_size + a greedy one)"
    tokens = config.trajectories_per_step * config.data.max_response_length
    total = config.total_steps(num_rows)
    epochs = total * batch.prompts_per_step / num_rows if num_rows else 0.0
    bound = "trainer.max_steps" if config.trainer.max_steps else "trainer.total_epochs, rounded up to whole steps"
    if not config.trainer.max_steps and (config.algorithm.filters or chosen_hooks("prompt_source", config.algorithm)):
        bound += "; at most: rows that are filtered or passed over take no place in a step"
    lines = [
        ("batch.prompts_per_step", batch.prompts_per_step, "groups that one learner step consumes"),
        ("batch.group_size", batch.group_size, "completions per prompt"),
        ("batch.tokens_per_microbatch", batch.tokens_per_microbatch, f"one sample has at most {longest}"),
        ("trajectories per step", config.trajectories_per_step, f"prompts_per_step * {per_group}"),
        ("optimiser steps per batch", updates, "algorithm.updates_per_batch"),
        ("groups per optimiser step", batch.prompts_per_step // updates, "prompts_per_step / updates_per_batch"),
        ("groups in flight, at most", config.groups_in_flight, "(largest staleness + 1) * prompts_per_step"),
        ("completion tokens per step, at most", tokens, "trajectories per step * data.max_response_length"),
        ("steps per epoch", f"{num_rows / batch.prompts_per_step:.4g}", f"{num_rows} training rows / prompts_per_step"),
        ("steps in all", total, f"{bound}; {epochs:.4g} epochs"),
        ("optimiser steps in all", total * updates, "steps in all * updates_per_batch"),
    ]
    width = max(len(name) for name, _, _ in lines)
    table = [f"{name:<{width}}  {value!s:>8}  {why}" for name, value, why in lines]
    notes = [f"note: {note}" for note in schedule_notes(config, total)]
    algorithm = ["# Algorithm", method_line(config.algorithm), *notes, ""]
    return "\n".join(["# Configuration", dump_config(config), *algorithm, "# Batches", *table])


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
