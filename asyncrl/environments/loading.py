"""From the configuration to a class that is ready to begin episodes, inside a worker and in the terminal."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl import plugins, user_functions
from asyncrl.config.secrets import with_secrets, without_secrets
from asyncrl.environments.image_rule import ImageRule
from asyncrl.environments.interface import Action, EpisodeOver, PromptTools, Start, ToolError
from asyncrl.environments.observation import Message, Observation, PastTurn, StepResult, key_of, recorded_info
from asyncrl.errors import UserError, did_you_mean, field_problem
from asyncrl.workers import channel

if TYPE_CHECKING:  # a worker reads no configuration: pydantic and the sections would be half of its start
    from asyncrl.config.environment import EnvironmentConfig

Source = dict[str, Any]
"""Name, path, package and bytes of a user's file as it was when the run began; of an installed part `module:name` as
its name, and an empty path."""


def source_of(config: EnvironmentConfig) -> Source:
    """Read the user's file that the section names. Raises UserError for a file or name that there is not."""
    name = config.name
    if not name:
        raise UserError("there is no environment: set environment.name to path/to/file.py:Class, or to a plug-in's")
    located = user_functions.locate(name, plugins.installed("environments"), "environment.name", "environments")
    if located is None:
        return {"name": plugins.description("environments", name).implementation, "path": ""}
    source = user_functions.read_source(located.path)
    return {"name": located.name, "path": str(located.path), "package": located.package, "source": source}


@dataclass(frozen=True)
class LoadedEnvironment:
    """A class with its settings, and the tools that prompts tell of."""

    cls: type[Any]
    config: Any
    tools: PromptTools | None
    file: str
    """The author's file, for naming lines in it; empty for a plug-in's."""
    rule: ImageRule

    async def begin(self, start: Start) -> tuple[Any, Observation | None]:
        """A new episode and its opening. Raises what the author's code raises, TypeError for what it may not return."""
        environment = self.cls()
        begin = getattr(environment, "begin", environment.reset)
        return environment, opening_of(await waited(begin(start)), self.cls, self.rule)

    async def step(self, environment: Any, action: Action) -> StepResult:
        """The episode's answer to one turn. Raises as `begin`."""
        try:
            result = await waited(environment.step(action))
        except ToolError as mistake:
            result = StepResult(Observation((Message("tool", (f"Error: {mistake}",)),)))
        except EpisodeOver as over:
            result = StepResult(None, over.reward, True, info=over.info)
        if not isinstance(result, StepResult):
            raise TypeError(f"step returned {type(result).__name__}, expected a StepResult")
        if result.observation is None and not result.done:
            raise TypeError("step returned no observation, but the episode is not done")
        if not isinstance(result.reward, int | float) or not abs(result.reward) < float("inf"):
            raise TypeError(f"step returned the reward {result.reward!r:.80}, expected a finite number")
        fitted, info = result.observation, result.info
        if fitted is not None:
            fitted, refused = self.rule.shown(fitted)
            info = info | {"unshown_image": refused.removeprefix("Error: ")} if refused else info
        self._check_info(info)
        if fitted is None:
            return replace(result, info=info)
        key = result.state_key or key_of(fitted)
        if len(key) > 16:
            key = key_of(Observation((Message("tool", (key,)),)))
        history = tuple(self._fitted(past) for past in result.history)
        return StepResult(fitted, float(result.reward), result.done, key, info, history)

    def _check_info(self, info: dict[str, Any]) -> None:
        """Raise TypeError for what neither the way to the rollout server nor the record takes."""
        try:
            recorded_info(info)
            channel.pack(info)
        except (TypeError, ValueError, OverflowError) as error:
            raise TypeError(f"{self.cls.__name__}.step returned an info that cannot be recorded: {error}") from None

    def _fitted(self, past: PastTurn) -> PastTurn:
        """The turn with its images under the rule of sizes. Raises TypeError for what is none."""
        is_one = isinstance(past, PastTurn) and isinstance(past.text, str) and isinstance(past.turn, int | None)
        if not is_one:
            raise TypeError(f"step returned a history with {past!r:.80}, expected PastTurns")
        return past if past.shown is None else replace(past, shown=self.rule.fit_observation(past.shown))


async def load(name: str, values: dict[str, Any], source: Source, rule: ImageRule) -> LoadedEnvironment:
    """Run the user's file and look at what it defines. `name` and `values` are environment.name and environment.config.
    Raises UserError."""
    author = _class_of(source)
    _check_class(author, name)
    settings = _settings(author, values)
    cls = type(author.__name__, (author,), {"__module__": author.__module__})
    tools = await cls.prepare(settings, rule) if hasattr(cls, "prepare") else None
    return LoadedEnvironment(cls, settings, tools, source["path"], rule)


async def waited(value: Any) -> Any:
    """The value, or the result of what is awaitable."""
    return await value if inspect.isawaitable(value) else value


def opening_of(opening: Any, cls: type[Any], rule: ImageRule) -> Observation | None:
    """Messages of a user from the result of the author's `reset`, under the rule of sizes: the opening is part of the
    prompt, whatever role the author gave it. Raises TypeError for what `reset` may not return."""
    if not isinstance(opening, Observation | None):
        raise TypeError(f"reset returned {type(opening).__name__}, expected an Observation or None")
    if opening is None:
        return None
    try:
        fitted = rule.fit_observation(opening)
    except ToolError as problem:
        raise TypeError(f"{cls.__name__}.reset returned an opening in which {problem}") from None
    return Observation(tuple(Message("user", each.parts) for each in fitted.messages))


def _class_of(source: Source) -> Any:
    name, path = source["name"], source["path"]
    if not path:
        return plugins.implementation(name)
    module = user_functions.load_module(Path(path), source["source"], source["package"])
    value = getattr(module, name, None)
    if value is None:
        there = [key for key, each in vars(module).items() if callable(each) and not key.startswith("_")]
        raise UserError(f"{path} has no {name!r}.{did_you_mean(name, there)}")
    return value


def _check_class(cls: Any, name: str) -> None:
    missing = [method for method in ("reset", "step") if not callable(getattr(cls, method, None))]
    if not isinstance(cls, type) or missing:
        has = f"has no method {' and no '.join(missing)}" if isinstance(cls, type) else "is no class"
        raise UserError(
            f"environment.name is {name!r}, which {has}. An environment is a class with reset(start) and step(action)"
        )


def _settings(cls: type[Any], values: dict[str, Any]) -> Any:
    """The class's `Config` of these values, without unknown keys."""
    model = getattr(cls, "Config", None)
    if model is None:
        if values:
            raise UserError(
                f"environment.config has {', '.join(values)}, but {cls.__name__} takes no settings. Remove it, or give "
                "the class a pydantic model named Config"
            )
        return {}
    from pydantic import BaseModel, ConfigDict, ValidationError  # as the author's file does

    if not (isinstance(model, type) and issubclass(model, BaseModel)):
        raise UserError(f"{cls.__name__}.Config is {model!r:.80}, expected a pydantic model")
    strict = type("Config", (model,), {"model_config": ConfigDict(extra="forbid"), "__module__": model.__module__})
    try:
        return strict.model_validate(with_secrets(values, "environment.config"))
    except ValidationError as error:
        problems = (field_problem(detail, model.model_fields, "environment.config.") for detail in error.errors())
        raise UserError(without_secrets("; ".join(problems), values)) from None
