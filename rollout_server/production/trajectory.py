"""A trajectory of several turns so far: its environment, and the columns of what was sampled and observed."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import numpy as np

from asyncrl.environments.observation import Observation
from asyncrl.environments.recording import recorded
from asyncrl.processing.encoded_prompt import EncodedPrompt
from asyncrl.processing.history import Shown
from asyncrl.rewards.score import Score
from protocol.messages import FinishReason, Limit, TrajectoryRecord, TrajectoryRole, TrajectoryStatus, Turn
from rollout_server.engines.base import Completion
from rollout_server.production.environments import EnvironmentSession

logger = logging.getLogger(__name__)


@dataclass
class Trajectory:
    """One trajectory so far: turns, and the columns of sampled and observed tokens."""

    index: int
    environment: EnvironmentSession | None
    """None when it is closed."""
    turns: list[Turn] = field(default_factory=list)
    pieces: list[EncodedPrompt] = field(default_factory=list)
    """Encoded pieces of all segments."""
    context: int = 0
    """Tokens at their end with which a new segment has begun, until a turn follows."""
    images: list[bytes] = field(default_factory=list)
    logprobs: list[np.ndarray] = field(default_factory=list)
    versions: list[np.ndarray] = field(default_factory=list)
    text: str = ""
    """Text of the last turn."""
    limit: Limit = ""
    failure: tuple[str, str] | None = None
    """Kind and message where its environment has failed."""
    environment_s: float = 0.0

    @property
    def length(self) -> int:
        return sum(len(piece.token_ids) for piece in self.pieces)

    def add_turn(self, sampled: Completion) -> None:
        start = self.length
        self.pieces.append(EncodedPrompt.of_text(sampled.token_ids))
        self.turns.append(Turn(start=start, end=self.length, finish_reason=sampled.finish_reason, context=self.context))
        self.logprobs.append(sampled.logprobs)
        self.versions.append(sampled.versions)

    def describe_turn(self, **changes: object) -> None:
        """Say more of the last turn."""
        self.turns[-1] = self.turns[-1].model_copy(update=changes)

    def add_observation(self, observation: Observation, shown: Shown) -> None:
        self.describe_turn(observation=recorded(observation, shown.pieces[-1].image_grids))
        self.pieces += shown.pieces
        self.context = shown.context
        self.images += observation.images
        self.logprobs.append(np.zeros(shown.num_tokens, np.float32))
        self.versions.append(np.full(shown.num_tokens, self.versions[-1][-1], np.int32))

    async def close(self) -> None:
        """Close the environment, once; what goes wrong there concerns nobody but the log."""
        environment, self.environment = self.environment, None
        try:
            if environment is not None:
                await environment.close()
        except Exception as error:
            logger.warning("an environment could not be closed: %s", error)

    def begin_anew(self, environment: EnvironmentSession) -> None:
        """Forget all turns, for another try."""
        self.environment, self.failure, self.limit = environment, None, ""
        self.context = 0
        for column in (self.turns, self.pieces, self.images, self.logprobs, self.versions):
            column.clear()

    def record(self, score: Score, role: TrajectoryRole, *, zero_over_limit: bool) -> TrajectoryRecord:
        finish_reason = self.turns[-1].finish_reason or FinishReason.STOP
        if self.failure is not None:
            score = Score(error_kind=self.failure[0], error_message=self.failure[1])
        reward = score.reward
        if reward is not None:
            reward = 0.0 if self.limit and zero_over_limit else reward + sum(turn.reward or 0.0 for turn in self.turns)
        return TrajectoryRecord(
            status=status_of(score, is_cut=finish_reason is FinishReason.LENGTH or bool(self.limit)),
            finish_reason=finish_reason,
            role=role,
            limit=self.limit,
            error_kind=score.error_kind,
            error_message=score.error_message,
            rewards=score.components,
            reward=reward,
            turns=tuple(self.turns),
        )


def status_of(score: Score, *, is_cut: bool) -> TrajectoryStatus:
    """A failed reward is a status with its kind; it is never a score of 0."""
    if score.status == "ok":
        return TrajectoryStatus.TRUNCATED if is_cut else TrajectoryStatus.FINISHED
    return TrajectoryStatus.TIMED_OUT if score.status == "timed_out" else TrajectoryStatus.ERROR
