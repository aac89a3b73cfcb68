"""`name: tools`: functions and tool sets, named in the configuration.

environment:
  name: tools
  config: {functions: [mine/tools.py:crop, calculator]}
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, ClassVar

from pydantic import Field

from asyncrl import user_functions
from asyncrl.environments.image_rule import ImageRule
from asyncrl.environments.interface import Action, PromptTools
from asyncrl.environments.observation import StepResult
from asyncrl_plugins.tools.calculator import calculator
from asyncrl_plugins.tools.environment import ToolEnvironment
from asyncrl_plugins.tools.prompt import ToolSettings
from asyncrl_plugins.tools.sandbox import python

NAMED: dict[str, Callable[..., Any]] = {"calculator": calculator, "python": python}


class FunctionsEnvironment(ToolEnvironment):
    """The tools answer calls; an episode ends at the first turn without one, its answer."""

    class Config(ToolSettings):
        functions: list[str] = Field(min_length=1)
        """Functions or classes with `@tool` methods: `path/to/file.py:name`, `calculator`, or `python`."""
        answer: str = ""
        """`path/to/file.py:function` from the text of the answer and `ctx` to the reward of its turn."""
        settings: dict[str, Any] = Field(default_factory=dict)
        """Settings of the functions' own, `ctx.settings`."""

    answer: ClassVar[Any] = None
    """Function that `environment.config.answer` names."""

    @classmethod
    async def prepare(cls, config: Any, image_rule: ImageRule) -> PromptTools | None:
        modules: dict[str, ModuleType] = {}  # two names of one file share its globals
        setting = "a tool in environment.config.functions"
        cls.functions = tuple(_function(name, modules, setting) for name in config.functions)
        if config.answer:
            cls.answer = staticmethod(_function(config.answer, modules, "environment.config.answer"))
            if check := getattr(cls.answer, "check", None):
                await check(config.settings)
        return await super().prepare(config, image_rule)

    def without_call(self, action: Action) -> StepResult:
        """The answer, where there is a function for it."""
        if self.answer is None:
            return super().without_call(action)
        reward = self.answer(action.text, self.ctx)
        return StepResult(None, reward, True, info=dict(self.ctx.info))


def _function(name: str, modules: dict[str, ModuleType], setting: str) -> Any:
    located = user_functions.locate(name, NAMED, setting)
    if located is None:
        return NAMED[name]
    path = str(located.path)
    if path not in modules:
        source = user_functions.read_source(located.path)
        modules[path] = user_functions.load_module(located.path, source, located.package)
    return user_functions.function_of(modules[path], located.name, may_be_async=True)
