"""Rules of environments: RLLaVA's class, which an adapter asks, and verl's section `rollout.multi_turn`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from asyncrl.config import yaml_text
from asyncrl.errors import UserError
from asyncrl.tools.import_config.derived_rules import (
    Outcome,
    Rule,
    Values,
    becomes,
    lost,
    no_counterpart,
    no_setting,
    other_values,
    read_with,
    same,
)

_RLLAVA_TURNS = 10
"""The default of RLLaVA's schema."""
_NAME_ONE = "environment.name or environment.tools: who answers a turn (docs/agents.md)"


def turns(value: int, theirs: Values) -> Outcome:
    if value <= 1:
        return no_setting("as here")
    if not theirs.get("rollout.env_config_path"):
        return lost("nobody answers a turn: there is no rollout.env_config_path")
    return becomes({"environment.limits.turns": value})


def environment(value: Any, theirs: Values) -> Outcome:
    """The class that their YAML file names; `write` puts an adapter before it, as it is asked in another way."""
    most = theirs.get("rollout.max_turns") or _RLLAVA_TURNS
    if most <= 1:
        return no_setting("there is one turn, which no environment answers")
    try:
        read, _ = yaml_text.parse(Path(value).read_text(encoding="utf-8"), value)
    except (OSError, UserError) as problem:
        why = problem.strerror if isinstance(problem, OSError) else problem
        return lost(f"cannot be read ({why}). Run this in their repository", _NAME_ONE)
    named = read.get("env") if isinstance(read, dict) else None
    if not isinstance(named, dict) or not isinstance(named.get("class_name"), str):
        return lost("it names no class under env.class_name", _NAME_ONE)
    name = named["class_name"]
    if ":" not in name:
        module, _, cls = name.rpartition(".")
        name = f"{module}:{cls}"
    settings = {
        "environment.name": name,
        "environment.config": {"theirs": named.get("config") or {}},
        "environment.call_format": "none",
        "environment.show_tools": "off",
        "environment.over_limit": "score",
        "environment.limits.turns": most,
    }
    return becomes(settings, "asked through an adapter; every turn is trained, not the last one alone")


def _multi_turn(value: Any, theirs: Values) -> Outcome:
    if not value:
        return no_setting("off there")
    if not theirs.get("rollout.multi_turn.tool_config_path"):
        return lost("nobody answers a turn: it names no tools")
    return no_setting("on where there is an environment")


def _tools(value: str, theirs: Values) -> Outcome:
    """verl's tools are classes with create, execute and release: they have to be written as functions."""
    if not theirs.get("rollout.multi_turn.enable"):
        return no_setting("off there")
    named: Any = []
    try:
        read, _ = yaml_text.parse(Path(value).read_text(encoding="utf-8"), value)
        named = read.get("tools", []) if isinstance(read, dict) else []
    except (OSError, UserError):  # the names are a help, no more
        pass
    names = [str(tool.get("class_name")) for tool in named if isinstance(tool, dict)]
    what = f"each of {', '.join(names)}" if names else "each of its tools"
    return lost("their tools are classes of verl's", f"environment.tools: {what} as a function (docs/agents.md)")


def _where_on(rule: Rule) -> Rule:
    return lambda value, theirs: (
        rule(value, theirs) if theirs.get("rollout.multi_turn.enable") else no_setting("off there")
    )


_FORMATS = {"hermes": "hermes", "qwen3_coder": "qwen_xml"}
RULES: dict[str, Rule] = {
    "rollout.max_turns": turns,
    "rollout.env_config_path": environment,
    "rollout.multi_turn.enable": _multi_turn,
    "rollout.multi_turn.tool_config_path": _tools,
    "rollout.multi_turn.interaction_config_path": lambda value, _: lost(
        "a user who answers is an environment", "environment.name: a class that plays the user (docs/agents.md)"
    ),
    "rollout.multi_turn.max_assistant_turns": _where_on(same("environment.limits.turns")),
    "rollout.multi_turn.max_user_turns": read_with("max_assistant_turns: who answers is asked once a turn"),
    "rollout.multi_turn.max_parallel_calls": _where_on(same("environment.limits.calls_per_turn")),
    "rollout.multi_turn.max_tool_response_length": _where_on(
        lambda value, _: no_counterpart("characters there; environment.limits.tool_text_tokens counts tokens")
    ),
    "rollout.multi_turn.format": _where_on(
        other_values("environment.call_format", _FORMATS, f"formats are {', '.join(_FORMATS)}")
    ),
}

_ADAPTER = '''"""Asks {name}
as RLLaVA does: reset(data), extract_action(text), step(action). Written by `asyncrl import-config`.

A text with an answer ends the episode; one with neither answer nor action is told so, as there.
"""

from __future__ import annotations

import numpy as np
from pydantic import BaseModel

from asyncrl.environments.interface import Action, Start, observe
from asyncrl.environments.observation import Observation, StepResult
from asyncrl.user_functions import load, locate

NAME = {name!r}
STEP_WEIGHT = {weight}
"""Weight of what their steps earn in the trajectory's reward. Their reward functions read the sum as `step_reward`, and
pay for it as each likes."""
NUDGE = "Please either call a tool or provide the final result with <answer>...</answer>."


class Row:
    """A row as their environments read one: arrays of one object."""

    def __init__(self, start: Start) -> None:
        images = [start.image(number) for number in range(len(start.images))]
        values = {{**start.row, "multi_modal_data": {{"images": images}}, "step_reward": 0.0}}
        self.non_tensor_batch = {{key: np.empty(1, object) for key in values}}
        for key, value in values.items():
            self.non_tensor_batch[key][0] = value


class Config(BaseModel):
    theirs: dict[str, object] = {{}}
    """What their class takes as `config`."""


class Theirs:
    Config = Config

    def reset(self, start: Start) -> None:
        function = locate(NAME, (), "NAME")
        assert function is not None
        self.theirs = load(function)(config=start.config.theirs)
        self.theirs.reset(Row(start))

    def step(self, action: Action) -> StepResult:
        asked = self.theirs.extract_action(action.text)
        if asked is None:
            if "<answer>" in action.text and "</answer>" in action.text:
                return StepResult(None, done=True)
            return StepResult(observe(NUDGE, role="user"))
        shown, earned, done, _ = self.theirs.step(asked)
        return StepResult(seen(shown), STEP_WEIGHT * earned, done, info={{"step_reward": float(earned)}})

    def close(self) -> None:
        self.theirs.close()


def seen(shown: object) -> Observation:
    """Text, an image, or a dictionary of both."""
    parts = [shown]
    if isinstance(shown, dict):
        parts = [shown.get("image") or shown.get("screenshot"), shown.get("text")]
    kept = [part if hasattr(part, "save") or isinstance(part, str) else str(part) for part in parts if part]
    return observe(*(kept or ["(nothing to see)"]), role="user")
'''


def adapter_of(name: str, *, earns: bool) -> str:
    """The text of a file that has the class `Theirs`; `earns`: what their steps give is the reward."""
    return _ADAPTER.format(name=name, weight=1.0 if earns else 0.0)
