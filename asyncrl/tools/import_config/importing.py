"""From their settings to ours: every key gets a line in the account, and what is still missing is named."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from asyncrl.config.suggest import suggestion
from asyncrl.tools.import_config.foreign_config import Theirs
from asyncrl.tools.import_config.outcome import Outcome, nothing_to_set
from asyncrl.tools.import_config.rules import BELOW, RULES, THEIR_DEFAULTS

ON_POLICY = "learner.max_staleness"


@dataclass(frozen=True)
class Line:
    """One key of theirs and what became of it."""

    key: str
    """As their files spell it."""
    value: Any
    outcome: Outcome
    is_default: bool = False
    """Not in their file: what their schema says."""


@dataclass(frozen=True)
class Import:
    theirs: Theirs
    settings: Mapping[str, Any]
    """Ours, dotted."""
    lines: tuple[Line, ...]
    missing: tuple[str, ...]

    def origin(self, ours: str) -> Line | None:
        """Where a setting of ours comes from."""
        return next((line for line in self.lines if ours in line.outcome.settings), None)


def translate(theirs: Theirs) -> Import:
    """What several keys say, the later one in their file says last; what is given comes before any default."""
    defaults = THEIR_DEFAULTS[theirs.framework]
    everything = {**defaults, **theirs.values}
    given = [Line(theirs.spelled(key), value, _outcome(key, value, everything)) for key, value in theirs.values.items()]
    said = {key for line in given for key in line.outcome.settings}
    implied = [
        Line(theirs.spelled(key), value, outcome, is_default=True)
        for key, value in defaults.items()
        if key not in theirs.values
        and _speaks(outcome := _outcome(key, value, everything))
        and not said & {*outcome.settings}
    ]
    launcher = [Line(flag, value, Outcome("no counterpart", text=_LAUNCHER)) for flag, value in theirs.launcher.items()]
    lines = [*given, *implied, *launcher]
    settings = {ON_POLICY: 0} | {key: value for line in lines for key, value in line.outcome.settings.items()}
    return Import(theirs, settings, tuple(lines), tuple(_missing(lines, settings)))


_LAUNCHER = "a flag of their launcher: asyncrl train CONFIG starts one learner and rollout.servers servers"


def _outcome(key: str, value: Any, everything: Mapping[str, Any]) -> Outcome:
    rule = RULES.get(key) or next((rule for start, rule in BELOW.items() if key.startswith(start)), None)
    if rule is None:
        hint = suggestion(key)
        return Outcome("unknown", text=hint or "nothing of this name is known")
    if value is None or value == {}:
        return nothing_to_set("empty there")
    try:
        return rule(value, everything)
    except (TypeError, AttributeError, ValueError):  # a rule knows the types that their schema allows
        return Outcome("unknown", text=f"{value!r} is not what their schema allows there")


def _speaks(outcome: Outcome) -> bool:
    return bool(outcome.settings) or outcome.verdict == "no counterpart"


def _missing(lines: list[Line], settings: Mapping[str, Any]) -> Iterator[str]:
    yield from (line.outcome.missing for line in lines if line.outcome.missing)
    for key, value in settings.items():
        texts = value if isinstance(value, list) else [value]
        yield from (
            f"{key}: it is {text}, with a variable that the script does not set"
            for text in texts
            if isinstance(text, str) and "$" in text
        )
    if "model.path" not in settings:
        yield "model.path: a Hugging Face model folder"
    if "data.train_files" not in settings:
        yield "data.train_files: where the rows come from"
    if "reward.functions" not in settings and not any("reward.functions" in line.outcome.missing for line in lines):
        yield "reward.functions: at least one, such as [{function: exact_match}]"
