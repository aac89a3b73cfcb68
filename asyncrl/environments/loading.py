"""From the configuration to a class that is ready to begin episodes, inside a worker and in the terminal."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from asyncrl import plugins, user_functions
from asyncrl.config.environment import EnvironmentConfig
from asyncrl.environments.call_formats import check_format
from asyncrl.environments.image_rule import ImageRule
from asyncrl.environments.interface import Action, Call, EpisodeOver, Start, ToolError
from asyncrl.environments.observation import Message, Observation, PastTurn, StepResult
from asyncrl.environments.recording import recorded_info
from asyncrl.environments.tool_environment import (
    ToolEnvironment,
    call_record,
    key_of,
    marked_methods,
    opening_of,
    waited,
)
from asyncrl.environments.tool_schema import Tool, tool_of, tools_by_name
from asyncrl.errors import UserError, did_you_mean, field_problem
from asyncrl.workers import channel

TOOLS = {"calculator": "asyncrl.environments.calculator:calculator"}
"""Built-in tools by the name that `environment.tools` takes; plug-ins bring others."""
Source = dict[str, Any]
"""Name, path, package and bytes of a user's file as it was when the run began; of an installed part `module:name` as
its name, and an empty path."""


def sources_of(config: EnvironmentConfig) -> dict[str, Any]:
    """Read the user's files that the section names. Raises UserError for a file or name that there is not."""
    if not config.name and not config.tools:
        raise UserError("there is no environment: set environment.name to path/to/file.py:Class, or environment.tools")
    if config.name:
        return {config.name: _environment_source(config.name)}
    return {tool: _tool_source(tool) for tool in config.tools}


def _environment_source(name: str) -> Source:
    installed = plugins.installed("environments")
    located = user_functions.locate(name, installed, "environment.name", "environments")
    if located is None:
        return {"name": plugins.description("environments", name).implementation, "path": ""}
    return _read(located)


def _tool_source(name: str) -> Source:
    names = [*TOOLS, *plugins.installed("tools")]
    located = user_functions.locate(name, names, "a tool in environment.tools", "tools")
    if located is None:
        built_in = TOOLS.get(name)
        return {"name": built_in or plugins.description("tools", name).implementation, "path": ""}
    return _read(located)


def _read(located: user_functions.UserFunction) -> Source:
    source = user_functions.read_source(located.path)
    return {"name": located.name, "path": str(located.path), "package": located.package, "source": source}


@dataclass(frozen=True)
class LoadedEnvironment:
    """A class with its settings, and the tools that the policy is shown."""

    cls: type[Any]
    config: Any
    tools: dict[str, Tool]
    call_format: str
    file: str
    """The author's file, for naming lines in it; empty for a built-in."""
    rule: ImageRule

    @property
    def schemas(self) -> dict[str, dict[str, Any]]:
        """JSON schema of each tool's parameters."""
        return {name: tool.parameters for name, tool in self.tools.items()}

    async def begin(self, start: Start) -> tuple[Any, Observation | None]:
        """A new episode and its opening. Raises what the author's code raises, TypeError for what it may not return."""
        environment = self.cls()
        if isinstance(environment, ToolEnvironment):
            return environment, await environment.begin(start)
        return environment, await opening_of(environment, start, self.rule)

    async def step(self, environment: Any, action: Action) -> StepResult:
        """The episode's answer to one turn. Raises as `begin`."""
        mistake = ToolError()
        try:
            result = await waited(environment.step(action))
        except ToolError as raised:
            mistake = raised
            result = StepResult(Observation((Message("tool", (f"Error: {mistake}",)),)))
        except EpisodeOver as over:
            result = StepResult(None, over.reward, True, info=over.info)
        if not isinstance(result, StepResult):
            raise TypeError(f"step returned {type(result).__name__}, expected a StepResult")
        if result.observation is None and not result.done:
            raise TypeError("step returned no observation, but the episode is not done")
        if not isinstance(result.reward, int | float) or not abs(result.reward) < float("inf"):
            raise TypeError(f"step returned the reward {result.reward!r:.80}, expected a finite number")
        fitted, unshown = result.observation, dict[str, object]()
        if fitted is not None and not isinstance(environment, ToolEnvironment):  # its own are fitted already
            fitted, refused = self.rule.shown(fitted)
            mistake = ToolError(refused.removeprefix("Error: ")) if refused else mistake
            unshown = {"unshown_image": str(mistake)} if refused else {}
        info = result.info | unshown if unshown else result.info
        if action.calls and "calls" not in info:  # of a class that reads its calls itself
            info = info | {"calls": [_record(call, mistake) for call in action.calls]}
        self._check_info(environment, info)
        if fitted is None:
            return replace(result, info=info)
        key = result.state_key or key_of(fitted)
        if len(key) > 16:
            key = key_of(Observation((Message("tool", (key,)),)))
        history = tuple(self._fitted(past) for past in result.history)
        return StepResult(fitted, float(result.reward), result.done, key, info, history)

    def _check_info(self, environment: Any, info: dict[str, Any]) -> None:
        """Raise TypeError for what neither the way to the rollout server nor the record takes."""
        try:
            recorded_info(info)
            channel.pack(info)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            of_tools = isinstance(environment, ToolEnvironment)
            whose = "has a ctx.info (or one of EpisodeOver)" if of_tools else "returned an info"
            raise TypeError(f"{self.cls.__name__}.step {whose} that cannot be recorded: {error}") from None

    def _fitted(self, past: PastTurn) -> PastTurn:
        """The turn with its images under the rule of sizes. Raises TypeError for what is none."""
        is_one = isinstance(past, PastTurn) and isinstance(past.text, str) and isinstance(past.turn, int | None)
        if not is_one:
            raise TypeError(f"step returned a history with {past!r:.80}, expected PastTurns")
        return past if past.shown is None else replace(past, shown=self.rule.fit_observation(past.shown))


def _record(call: Call, mistake: ToolError) -> dict[str, object]:
    if call.error:
        return call_record(call, call.error, "malformed")
    return call_record(call, str(mistake), mistake.kind if str(mistake) else "")


async def load(config: EnvironmentConfig, sources: dict[str, Source], rule: ImageRule) -> LoadedEnvironment:
    """Run the user's files and look at what they define. Raises UserError."""
    modules: dict[str, ModuleType] = {}  # two names of one file share its globals
    file = ""
    if config.name:
        source = sources[config.name]
        cls, file = _attribute(source, modules), source["path"]
        _check_class(cls, config.name)
    else:
        file = next((source["path"] for source in sources.values() if source["path"]), "")
        tools_of_config = tuple(_attribute(sources[name], modules) for name in config.tools)
        cls = type("Tools", (ToolEnvironment,), {"functions": tools_of_config})
    if functions := getattr(cls, "functions", ()):
        functions = tuple(_attribute(_tool_source(f), modules) if isinstance(f, str) else f for f in functions)
        cls = type(cls.__name__, (cls,), {"functions": functions, "__module__": cls.__module__})
    for function in functions:
        if hasattr(function, "check_machine"):
            await function.check_machine()
    settings = _settings(cls, config.config)
    wish = "" if config.call_format == "auto" else config.call_format
    if issubclass(cls, ToolEnvironment):
        limits = {"calls_per_turn": config.limits.calls_per_turn, "image_rule": rule}
        cls = type(cls.__name__, (cls,), limits | {"__module__": cls.__module__})
    list_tools: Callable[[Any], Awaitable[list[Tool]]] | None = getattr(cls, "list_tools", None)
    tools = tools_by_name(await list_tools(settings) if list_tools else map(tool_of, marked_methods(cls)))
    call_format = wish or getattr(cls, "call_format", "") or ("hermes" if tools else "none")
    loaded = LoadedEnvironment(cls, settings, tools, call_format, file, rule)
    check_format(call_format, loaded.schemas)
    return loaded


def _attribute(source: Source, modules: dict[str, ModuleType]) -> Any:
    name, path = source["name"], source["path"]
    if not path:
        return plugins.implementation(name)
    if path not in modules:
        modules[path] = user_functions.load_module(Path(path), source["source"], source["package"])
    value = getattr(modules[path], name, None)
    if value is None:
        there = [key for key, each in vars(modules[path]).items() if callable(each) and not key.startswith("_")]
        raise UserError(f"{path} has no {name!r}.{did_you_mean(name, there)}")
    if not callable(value):
        raise UserError(f"{name} in {path} is {type(value).__name__}, neither a class nor a function")
    return value


def _check_class(cls: Any, name: str) -> None:
    missing = [method for method in ("reset", "step") if not callable(getattr(cls, method, None))]
    if not isinstance(cls, type) or missing:
        has = f"has no method {' and no '.join(missing)}" if isinstance(cls, type) else "is no class"
        raise UserError(
            f"environment.name is {name!r}, which {has}. An environment is a class with reset(start) and step(action), "
            "or is derived from asyncrl.environments.tool_environment.ToolEnvironment"
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
    if not (isinstance(model, type) and issubclass(model, BaseModel)):
        raise UserError(f"{cls.__name__}.Config is {model!r:.80}, expected a pydantic model")
    strict = type("Config", (model,), {"model_config": ConfigDict(extra="forbid"), "__module__": model.__module__})
    try:
        return strict.model_validate(values)
    except ValidationError as error:
        problems = (field_problem(detail, model.model_fields, "environment.config.") for detail in error.errors())
        raise UserError("; ".join(problems)) from None
