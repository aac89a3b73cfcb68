"""Environments of trajectories: what one does, where they come from, and those of the run's pool, an episode each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Protocol

from asyncrl.config.environment import EnvironmentConfig
from asyncrl.environments.interface import Start
from asyncrl.environments.observation import Observation, StepResult
from asyncrl.environments.pool import EnvironmentPool, Episode
from asyncrl.processing.processor import PromptProcessor
from asyncrl.processing.prompt_processor import image_rule


class Environment(Protocol):
    """One trajectory's side of an environment. What it raises is a failure of the environment: a status, never a 0."""

    async def reset(self, start: Start, /) -> Observation | None:
        """Begin, and say what it opens with: the same bytes for all trajectories of a ticket."""
        ...

    async def step(self, text: str, /) -> StepResult:
        """The answer to a turn, of which `text` is what was sampled, without special tokens."""
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True)
class Environments:
    """Source of environments for trajectories."""

    make: Callable[[], Environment]
    capacity: float = inf
    """Most of them at a time."""
    trajectory_s: float = inf
    """Seconds of a trajectory after which it takes no further turn."""
    prompt_tokens: float = inf
    """Most tokens of a prompt with what the environment opens with (`data.max_prompt_length`)."""
    text_tokens: float = inf
    """Most tokens of the text of one observation; what is cut off is said in its place."""
    retries: int = 0
    """Further tries of a trajectory whose environment has failed, with the same start and the same first turn."""
    zero_over_limit: bool = False
    """Whether a trajectory that a limit ended is scored with 0."""
    in_rounds: bool = False
    """Whether all trajectories of a batch of tickets take their turns together, so that a run repeats bit for bit."""


class PooledEnvironment:
    """An episode of a pool as the environment of one trajectory."""

    def __init__(self, pool: EnvironmentPool):
        self._pool = pool
        self._episode: Episode | None = None
        self._turns = 0

    async def reset(self, start: Start) -> Observation | None:
        """Begin an episode. Raises EnvironmentFailed as the pool does."""
        self._episode = await self._pool.begin(start)
        return self._episode.opening

    async def step(self, text: str) -> StepResult:
        """The environment's answer to a turn. Raises EnvironmentFailed."""
        assert self._episode is not None, "reset() comes first"
        action = self._pool.action(text, self._turns)
        self._turns += 1
        return await self._episode.step(action)

    async def close(self) -> None:
        if self._episode is not None:
            await self._episode.close()


def make_pool(config: EnvironmentConfig, processor: PromptProcessor) -> EnvironmentPool | None:
    """The pool of the configured environment, not started; None without one."""
    if not config.is_used:
        return None
    return EnvironmentPool(config, image_rule(processor))


def environments_of(
    pool: EnvironmentPool, config: EnvironmentConfig, *, prompt_tokens: int, in_rounds: bool
) -> Environments:
    return Environments(
        make=lambda: PooledEnvironment(pool),
        capacity=config.capacity,
        trajectory_s=config.timeouts.trajectory_s,
        prompt_tokens=prompt_tokens,
        text_tokens=config.limits.tool_text_tokens,
        retries=config.retries,
        zero_over_limit=config.over_limit == "zero",
        in_rounds=in_rounds,
    )
