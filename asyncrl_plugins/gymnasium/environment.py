"""`name: gymnasium`: an environment of the gymnasium package, seen through its pictures and acted on by words.

    environment:
      name: gymnasium
      config:
        id: FrozenLake-v1
        kwargs: {is_slippery: false}
        actions: [left, down, right, up]

Needs `pip install asyncrl[gymnasium]`. Each trajectory has an environment of its own, seeded by its ticket.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from PIL import Image
from pydantic import BaseModel, Field

from asyncrl import user_functions
from asyncrl.environments.image_rule import ImageRule
from asyncrl.environments.interface import Action, Start, ToolError, observe
from asyncrl.environments.observation import Observation, StepResult
from asyncrl.errors import UserError
from asyncrl.user_functions import one_line


class GymnasiumEnvironment:
    """The whole text of a turn is the action: a word of `actions`, or what `act` makes of it."""

    class Config(BaseModel):
        id: str
        """Registered name, `module:Name-v1` for one that importing `module` registers."""
        kwargs: dict[str, Any] = Field(default_factory=dict)
        """Arguments of `gymnasium.make`."""
        row_kwargs: list[str] = Field(default_factory=list)
        """Columns of the row that are arguments, too, such as `desc`, a map of FrozenLake."""
        actions: list[str] = Field(default_factory=list)
        """Word of each action of a Discrete space, from 0."""
        observe: str = ""
        """`file.py:function` from (observation, info) to text, an image, or a list of them. Empty: the observation
        where it is an image, else what `render` draws."""
        act: str = ""
        """`file.py:function` from a text to an action; a ValueError of it is text for the policy."""

    @classmethod
    async def prepare(cls, config: Any, image_rule: ImageRule) -> None:
        """Check what can be checked before the first episode. Raises UserError."""
        if bool(config.act) == bool(config.actions):
            raise UserError("environment.config: give either `actions`, words of a Discrete space, or `act`")
        _functions(config)
        try:
            made = _make(config, {})
        except UserError:
            raise
        except Exception as error:
            if config.row_kwargs:
                return  # it may want them
            raise UserError(f"gymnasium.make({config.id!r}) fails: {one_line(error)}") from error
        count = getattr(made.action_space, "n", None)
        made.close()
        if config.actions and count != len(config.actions):
            space = f"a space of {count} actions" if count is not None else "no Discrete action space"
            raise UserError(f"environment.config.actions has {len(config.actions)} words, but {config.id} has {space}")

    def reset(self, start: Start) -> Observation:
        self._config = start.config
        self._observe, self._act = _functions(start.config)
        columns = start.columns(start.config.row_kwargs, "environment.config.row_kwargs")
        self._made = _make(start.config, columns)
        self._steps = 0
        observation, info = self._made.reset(seed=start.seed % 2**32)
        return self._seen(observation, info, "user")

    def step(self, action: Action) -> StepResult:
        chosen = self._action(action.text.strip())
        observation, reward, terminated, truncated, info = self._made.step(chosen)
        self._steps += 1
        done = bool(terminated or truncated)
        facts: dict[str, object] = {"terminated": bool(terminated), "truncated": bool(truncated), "steps": self._steps}
        seen = None if done else self._seen(observation, info, "tool")
        return StepResult(seen, float(reward), done, info=facts)

    def close(self) -> None:
        if hasattr(self, "_made"):
            self._made.close()

    def _action(self, text: str) -> Any:
        if self._act is None:
            if text not in self._config.actions:
                raise ToolError(f"there is no action {text!r:.80}. Actions: {', '.join(self._config.actions)}")
            return self._config.actions.index(text)
        try:
            chosen = self._act(text)
        except ValueError as error:
            raise ToolError(str(error)) from None
        if not self._made.action_space.contains(chosen):
            raise ToolError(f"{text!r:.80} is outside of the actions {self._made.action_space}")
        return chosen

    def _seen(self, observation: Any, info: dict[str, Any], role: str) -> Observation:
        if self._observe is not None:
            parts = self._observe(observation, info)
            return observe(*(parts if isinstance(parts, list | tuple) else [parts]), role=role)
        pixels = observation if getattr(observation, "ndim", 0) == 3 else self._made.render()
        if getattr(pixels, "ndim", 0) != 3:
            raise TypeError(
                f"{self._config.id} shows no picture: its observation is {type(observation).__name__}, and it draws "
                "nothing. Set environment.config.observe"
            )
        return observe(Image.fromarray(pixels), role=role)


def _functions(config: Any) -> Sequence[Callable[..., Any] | None]:
    """`observe` and `act`, where they are given."""
    return [
        user_functions.resolve(name, {}, f"environment.config.{setting}") if name else None
        for setting, name in (("observe", config.observe), ("act", config.act))
    ]


def _make(config: Any, more: dict[str, Any]) -> Any:
    try:
        import gymnasium  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UserError(
            "environment.name is gymnasium, but the package is not installed: pip install 'asyncrl[gymnasium]'"
        ) from error
    drawn = {} if config.observe else {"render_mode": "rgb_array"}
    return gymnasium.make(config.id, **drawn | config.kwargs | more)
