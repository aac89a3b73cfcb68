"""The `environment` section: which environment, and the limits of an episode."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from asyncrl.config.sections import Section
from asyncrl.plugins import description, installed
from asyncrl.user_functions import what_it_may_be
from protocol.messages.tickets import HistoryRule

OverLimit = Literal["mask", "score", "zero"]


class LimitsConfig(Section):
    """Bounds of one trajectory; where one is reached `environment.over_limit` says what becomes of it."""

    turns: int = Field(default=6, gt=0)
    """Most turns of the policy."""
    tokens: int = Field(default=2048, gt=0)
    """Most tokens behind the prompt, sampled and observed ones together; of all segments, where `history` or
    `keep_images` makes several: what is shown again counts again, as it is computed again in training."""
    tokens_per_turn: int = Field(default=512, gt=0)
    """Most sampled tokens of one turn."""
    images: int = Field(default=8, ge=0)
    """Most images in observations; one that later segments show again counts once."""
    image_pixels: int = Field(default=200_704, gt=0)
    """Largest area of an observed image, in pixels; a larger one is scaled down."""
    tool_text_tokens: int = Field(default=512, gt=0)
    """Most tokens of the text of one observation; what is cut off is said in its place. asyncrl's own words about a
    mistake are not cut."""

    @model_validator(mode="after")
    def _check(self) -> LimitsConfig:
        if self.tokens_per_turn > self.tokens:
            raise ValueError(
                f"limits.tokens_per_turn ({self.tokens_per_turn}) is more than limits.tokens ({self.tokens}), which is "
                "data.max_response_length where it is not given. Lower the former or raise the latter"
            )
        return self


class TimeoutsConfig(Section):
    """Longest times, in seconds. What takes longer is an error of the environment, never a score."""

    step_s: float = Field(default=30.0, gt=0)
    """Time limit for the start of an episode, and for the answer to one turn; then the environment's process is
    killed."""
    trajectory_s: float = Field(default=300.0, gt=0)
    """Time limit for all turns of a trajectory, the policy's share included."""


class EnvironmentConfig(Section):
    """Environment of trajectories with several turns (docs/agents.md)."""

    name: str = ""
    """Class of the environment, `path/to/file.py:Class` or `package.module:Class`, or the name of a plug-in, such as
    `tools`. Empty: none."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Settings of the class's own, checked by its `Config`. A text `env:NAME` stands for that environment variable of
    learner and rollout servers: files of the run and trackers have the name alone."""
    limits: LimitsConfig = LimitsConfig()
    timeouts: TimeoutsConfig = TimeoutsConfig()
    history: HistoryRule = "whole"
    """View of earlier turns: `whole`, or `strip_thinking`: without their thoughts (up to `</think>`). Where this is not
    what the row of tokens holds, a new segment begins, in which the history is shown again."""
    keep_images: int = Field(default=0, ge=0)
    """Images of observations that a turn sees: the newest, and at least all of the last observation. Where an older one
    is left out a new segment begins. 0 leaves none out."""
    over_limit: OverLimit = "mask"
    """A trajectory that reaches a limit: `score` trains it as it is, `zero` with a score of 0, `mask` counts its score
    in the group and its tokens in the loss's denominators, and does not train it (Mini-o3)."""
    workers: int = Field(default=8, gt=0)
    """Processes: all trajectories of a group are live at the same time."""
    instances_per_worker: int = Field(default=1, gt=0)
    """Episodes in one process. Async ones run side by side; of plain ones a slow step delays its neighbours."""
    memory_limit_mib: int = Field(default=2048, gt=0)
    """Most address space of a process."""
    retries: int = Field(default=1, ge=0)
    """Further tries, from the start and with the same seed, of an episode whose environment failed."""

    @field_validator("name")
    @classmethod
    def _name_is_there(cls, name: str) -> str:
        there = installed("environments")
        if name and ":" not in name and name not in there:
            meant = what_it_may_be(name, there, "environment.name", "environments")
            raise ValueError(f"environment.name is {name!r}, which is {meant}")
        return name

    @model_validator(mode="after")
    def _check(self) -> EnvironmentConfig:
        if self.timeouts.step_s > self.timeouts.trajectory_s:
            raise ValueError(f"timeouts.step_s ({self.timeouts.step_s:g}) is longer than timeouts.trajectory_s")
        return self

    @property
    def is_used(self) -> bool:
        """True where trajectories have an environment."""
        return bool(self.name)

    @property
    def asks_a_server(self) -> bool:
        """True for a plug-in that asks a server for its tools, as the fact of this name in its description says."""
        return (
            self.name in installed("environments") and "asks_a_server" in description("environments", self.name).facts
        )

    @property
    def may_reward(self) -> bool:
        """True where turns may earn something by themselves, as of a class. A plug-in may only answer, which the fact
        `may_reward` of its description says: True, False, or the key of `config` with which it rewards."""
        if self.name in installed("environments"):
            fact = description("environments", self.name).facts.get("may_reward", True)
            return bool(self.config.get(fact)) if isinstance(fact, str) else bool(fact)
        return bool(self.name)

    @property
    def capacity(self) -> int:
        """Most episodes at a time."""
        return self.workers * self.instances_per_worker
