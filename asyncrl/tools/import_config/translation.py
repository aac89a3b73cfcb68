"""Apply the table to a foreign configuration: a line for every key, and the settings still missing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from asyncrl.config.keys import closest_key
from asyncrl.tools.import_config.derived_rules import Outcome, no_counterpart, no_setting
from asyncrl.tools.import_config.foreign_config import ForeignConfig
from asyncrl.tools.import_config.rules import RULES, SECTIONS, THEIR_DEFAULTS

_LAUNCHER = "a flag of their launcher: asyncrl train CONFIG starts one learner and rollout.servers servers"


@dataclass(frozen=True)
class Line:
    """One foreign key and its translation."""

    key: str
    """Key in foreign spelling."""
    value: Any
    outcome: Outcome
    is_default: bool = False
    """Not in their file: what their schema says."""


@dataclass(frozen=True)
class Import:
    theirs: ForeignConfig
    settings: Mapping[str, Any]
    """Our keys, dotted, and their values."""
    lines: tuple[Line, ...]
    missing: tuple[str, ...]

    @property
    def lost(self) -> tuple[Line, ...]:
        return tuple(line for line in self.lines if line.outcome.verdict == "lost")


def translate(theirs: ForeignConfig) -> Import:
    """Applies the rules. The last of several keys for one setting decides; what is given comes before any default."""
    defaults = THEIR_DEFAULTS[theirs.framework]
    values = {**defaults, **theirs.values}
    given = [Line(theirs.spelled(key), value, _outcome(key, value, values)) for key, value in theirs.values.items()]
    given_settings = {key for line in given for key in line.outcome.settings}
    implied = [
        line
        for key, value in defaults.items()
        if key not in theirs.values
        for line in [Line(theirs.spelled(key), value, _outcome(key, value, values), is_default=True)]
        if line.outcome.settings or line.outcome.verdict in ("no counterpart", "lost")
        if not given_settings & {*line.outcome.settings}
    ]
    launcher = [Line(flag, value, no_counterpart(_LAUNCHER)) for flag, value in theirs.launcher.items()]
    lines = [*given, *implied, *launcher]
    settings = {"learner.max_staleness": 0} | {
        key: value for line in lines for key, value in line.outcome.settings.items()
    }
    return Import(theirs, settings, tuple(lines), tuple(_missing(lines, settings)))


def _outcome(key: str, value: Any, values: Mapping[str, Any]) -> Outcome:
    if key.endswith("._target_"):
        return no_setting("a class of theirs")
    rule = RULES.get(key) or next((rule for start, rule in SECTIONS.items() if key.startswith(start)), None)
    if rule is None:
        meant = closest_key(key)
        is_near = bool(meant) and (meant.partition(".")[0] == key.partition(".")[0] or "." not in key)
        return Outcome("unknown", text=f"did you mean {meant}?" if is_near else "nothing of this name is known")
    if value is None or value == {}:
        return no_setting("empty there")
    try:
        return rule(value, values)
    except (TypeError, AttributeError, ValueError):  # a rule knows the types that their schema allows
        return Outcome("unknown", text=f"{value!r} is not what their schema allows there")


def _missing(lines: list[Line], settings: Mapping[str, Any]) -> Iterator[str]:
    yield from (line.outcome.missing for line in lines if line.outcome.missing)
    for key, value in settings.items():
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and "$" in text:
                yield f"{key}: it is {text}, with a variable that the script does not set"
    if "model.path" not in settings:
        yield "model.path: a Hugging Face model folder"
    if "data.train_files" not in settings:
        yield "data.train_files: where the rows come from"
    if "reward.functions" not in settings and not any("reward.functions" in line.outcome.missing for line in lines):
        yield "reward.functions: at least one, such as [{function: exact_match}]"
