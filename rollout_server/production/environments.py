"""Environments of trajectories: what one does, and where they come from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Protocol

from asyncrl.config.environment import EnvironmentConfig
from asyncrl.environments.episodes import EnvironmentWorkers, Episode
from asyncrl.environments.interface import Start
from asyncrl.environments.observation import Observation, StepResult
from asyncrl.processing.processor import PromptProcessor, image_rule


class EnvironmentSession(Protocol):
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

    make: Callable[[], EnvironmentSession]
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


def environment_workers(config: EnvironmentConfig, processor: PromptProcessor) -> EnvironmentWorkers | None:
    """Workers of the configured environment, not started; None without one."""
    if not config.is_used:
        return None
    return EnvironmentWorkers(config, image_rule(processor))


def environments_of(
    workers: EnvironmentWorkers, config: EnvironmentConfig, *, prompt_tokens: int, in_rounds: bool
) -> Environments:
    return Environments(
        make=lambda: Episode(workers),
        capacity=config.capacity,
        trajectory_s=config.timeouts.trajectory_s,
        prompt_tokens=prompt_tokens,
        text_tokens=config.limits.tool_text_tokens,
        retries=config.retries,
        zero_over_limit=config.over_limit == "zero",
        in_rounds=in_rounds,
    )
