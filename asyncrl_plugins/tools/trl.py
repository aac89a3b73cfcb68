"""`name: trl`: a class written for TRL's `environment_factory`, as it is.

    environment:
      name: trl
      config: {factory: mine/wordle.py:Wordle}

Its public methods beside `reset` and `get_reward` are the tools, `reset` gets the row's columns, and what it returns is
the opening. TRL itself is not needed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ClassVar

from PIL import Image

from asyncrl import user_functions
from asyncrl.environments.interface import Action, Start, ToolError, observe
from asyncrl.environments.loading import waited
from asyncrl.environments.observation import Observation, Part, StepResult
from asyncrl.errors import UserError
from asyncrl.user_functions import one_line
from asyncrl_plugins.tools.environment import ToolEnvironment
from asyncrl_plugins.tools.prompt import ToolSettings
from asyncrl_plugins.tools.schema import Tool, tool_of

NO_TOOLS = ("reset", "get_reward")


class TrlEnvironment(ToolEnvironment):
    """The reward of a turn is by how much `get_reward` has changed in it, so that the sum is what it says at the end,
    whatever ends the trajectory. There is none without that method. A ValueError is text for the policy, as TRL's
    examples mean it; in TRL every exception is."""

    class Config(ToolSettings):
        factory: str
        """`file.py:Class`, or a function without arguments that makes an object."""
        reset_columns: list[str] | None = None
        """Columns of the row that `reset` gets; all of them where this is left out, as in TRL."""

    made: ClassVar[Any]

    @classmethod
    async def list_tools(cls, config: Any) -> list[Tool]:
        cls.made = staticmethod(user_functions.resolve(config.factory, {}, "environment.config.factory"))
        try:
            one = cls.made()
        except Exception as error:
            raise UserError(f"environment.config.factory: {config.factory} fails: {one_line(error)}") from error
        if not callable(getattr(one, "reset", None)):
            raise UserError(f"environment.config.factory: what {config.factory} makes has no method reset")
        return [tool_of(method) for method in _methods(one)]

    def own_tools(self, made: list[Any]) -> list[Tool]:
        self._one = self.made()
        return [tool_of(method) for method in _methods(self._one)]

    async def reset(self, start: Start) -> Observation | None:
        self._earned = 0.0
        names = start.config.reset_columns
        row = start.row if names is None else start.columns(names, "environment.config.reset_columns")
        opening = await waited(self._one.reset(**row))
        return None if opening is None else observe(*_parts(opening, "reset"), role="user")

    async def call(self, tool: Tool, arguments: dict[str, Any]) -> Any:
        assert tool.function is not None, "made of a method"
        try:
            return _parts(await waited(tool.function(**arguments)), tool.name)
        except ValueError as error:
            raise ToolError(str(error)) from None

    async def step(self, action: Action) -> StepResult:
        result = await super().step(action)
        if not hasattr(self._one, "get_reward"):
            return result
        said = await waited(self._one.get_reward())
        if isinstance(said, bool) or not isinstance(said, int | float):
            raise TypeError(f"get_reward returned {said!r:.80}, expected a number")
        reward, self._earned = said - self._earned, float(said)
        return StepResult(result.observation, reward, result.done, result.state_key, result.info)


def _methods(one: Any) -> list[Callable[..., Any]]:
    """The tools of an object, as TRL finds them: public functions of its class."""
    found = inspect.getmembers(type(one), predicate=inspect.isfunction)
    return [getattr(one, name) for name, _ in found if name not in NO_TOOLS and not name.startswith("_")]


def _parts(result: Any, name: str) -> list[Any]:
    """Parts of a method's result: content blocks of chat messages become text and images."""
    blocks = result if isinstance(result, list) else [result]
    if not any(isinstance(block, dict) and "type" in block for block in blocks):
        return blocks if name == "reset" else [result]
    parts: list[Part | Image.Image] = []
    for block in blocks:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind not in ("text", "image") or kind not in block:
            raise TypeError(f"{name} returned the block {block!r:.80}, expected a text or an image")
        parts.append(block[kind])
    return parts
