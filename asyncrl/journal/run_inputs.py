"""Inputs of a run, as its journal records them: settings of the update, rows, and whatever scores completions (rewards
and environment, with the contents of their files). What changes under a run is refused, or accepted and recorded."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import xxhash

from asyncrl.config.environment import EnvironmentConfig
from asyncrl.config.sections import RewardConfig, component_name
from asyncrl.errors import UserError
from asyncrl.journal.database import JournalView
from asyncrl.plugins import installed
from asyncrl.rewards.spec import locate
from asyncrl.user_functions import locate as user_function
from asyncrl.user_functions import read_source, source_fingerprint

ACCEPT = "--accept-changes"
COMPONENT, FILE, SOURCE = "reward component ", "file of ", "source"
"""Beginning of the name of a reward component; in it, names of the file of an argument and of its function's file."""
ENVIRONMENT = "environment's source"
Recorded = Literal["update", "inputs"]
"""Settings of the update, or rows and rewards."""


def scoring_settings(reward: RewardConfig, environment: EnvironmentConfig) -> dict[str, Any]:
    """Settings and fingerprints, by name. A file that is not on this machine, where only rollout servers need it, has
    no fingerprint."""
    scoring: dict[str, Any] = {"reward.accuracy": reward.accuracy_component}
    for component in reward.functions:
        described = component.model_dump(mode="json", exclude_defaults=True) | {"weight": component.weight}
        described["function"] = component.function.rpartition("/")[2]
        texts = ((key, text) for key, text in component.kwargs.items() if isinstance(text, str))
        files = {f"{FILE}{key}": read_source(Path(text)) for key, text in texts if os.path.isfile(text)}
        described |= {name: xxhash.xxh3_64_hexdigest(content) for name, content in files.items()}
        with suppress(UserError):
            if located := locate(component.function):
                described[SOURCE] = source_fingerprint(located)
        scoring[f"{COMPONENT}{component_name(component)}"] = described
    if (name := environment.name) and name not in installed("environments"):
        with suppress(UserError):
            if located := user_function(name, (), "environment.name"):
                scoring[ENVIRONMENT] = source_fingerprint(located)
    return scoring


def scoring_fingerprints(scoring: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Names and fingerprints by which a learner tells whether a server scores as it does: the first is of all settings,
    the others of the files that are on this machine."""
    settings: dict[str, Any] = {}
    files = [(ENVIRONMENT, scoring[ENVIRONMENT])] if ENVIRONMENT in scoring else []
    for name, described in scoring.items():
        if name.startswith(COMPONENT):
            said = {key: f"{name}: {_said(key, described)}" for key in described if _is_file(key)}
            files += [(words, described[key]) for key, words in said.items()]
            settings[name] = {key: value for key, value in described.items() if key not in said}
    text = json.dumps(settings, sort_keys=True, default=str)
    return ("reward.functions", xxhash.xxh3_64_hexdigest(text.encode())), *files


def describe_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """Describe the settings that differ, by key; of a reward component only the entries that do."""
    return {
        key: _change(key, before.get(key), now.get(key)) for key in {**now, **before} if before.get(key) != now.get(key)
    }


def _change(key: str, before: Any, now: Any) -> str:
    if not key.startswith(COMPONENT):
        return f"{key} was {before}, is {now}"
    if before is None or now is None:
        return f"{key} is {'new' if before is None else 'gone'}"
    differ = [name for name in {**now, **before} if before.get(name) != now.get(name)]
    said = [f"{name} was {before.get(name)}, is {now.get(name)}" for name in differ if not _is_file(name)]
    files = [name for name in differ if _is_file(name) and not (name == SOURCE and "function" in differ)]
    said += [f"{_said(name, now)} is not what it was" for name in files]
    return f"{key}: {', '.join(said)}"


def _is_file(entry: str) -> bool:
    return entry == SOURCE or entry.startswith(FILE)


def _said(entry: str, component: Mapping[str, Any]) -> str:
    """Words for an entry that is the fingerprint of a file."""
    if entry == SOURCE:
        return f"{str(component['function']).rpartition(':')[0]}, or a file that it imports,"
    return f"the file of its argument {entry.removeprefix(FILE)}"


@dataclass(frozen=True)
class RecordedUpdate:
    """Settings of the update, and the step after which they hold."""

    after_step: int
    settings: Mapping[str, Any]


def recorded_updates(journal: JournalView, name: Recorded = "update") -> list[RecordedUpdate]:
    """Settings (`update`) or rows and rewards (`inputs`) that the run began with, and each change since. Of two after
    the same step, the later one holds."""
    first = journal.meta(name)
    found = [] if first is None else [RecordedUpdate(0, json.loads(first))]
    while found and (text := journal.meta(f"{name}.{len(found)}")):
        found.append(RecordedUpdate(*json.loads(text)))
    return found


def scoring_at(journal: JournalView, step: int | None = None) -> dict[str, Any]:
    """Rewards and environment, as `scoring_settings` has them, that scored the run at a step, or that score it now."""
    recorded = [one for one in recorded_updates(journal, "inputs") if step is None or one.after_step < max(step, 1)]
    settings = recorded[-1].settings if recorded else {}
    scoring = ("reward.accuracy", ENVIRONMENT, COMPONENT)
    return {name: value for name, value in settings.items() if name.startswith(scoring)}


def check_scoring(journal: JournalView, now: Mapping[str, Any]) -> None:
    """Raise UserError where the run would go on with other rewards, as `scoring_settings` has them, than it had."""
    before = scoring_at(journal)
    if before and (changed := describe_changes(before, now)):
        raise changed_inputs(journal, changed)


def changed_inputs(journal: JournalView, changed: Mapping[str, str]) -> UserError:
    """The refusal of a start that would go on with other rows or rewards."""
    return UserError(
        f"--resume of {journal.path}: {'; '.join(changed.values())}. The run so far did not have this change. Undo it, "
        f"or add {ACCEPT} to go on with it"
    )
