"""Observations of an environment, in plain types.

These types are the border between whoever runs an environment and whoever makes tokens of its answers: the rollout
server asks, the bridge encodes, the record carries, the learner encodes again. Nothing here knows of tokens.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Literal

from asyncrl.errors import UserError
from asyncrl.user_functions import storable
from protocol.nesting import LONGEST_INFO, check_depth

THINKING_BEGINS, THINKING_ENDS = "<think>", "</think>"
LEFT_OUT = "[image left out]"
"""Text in the place of an image that is no longer shown: the policy knows that there was one, and numbers stay."""
Part = str | bytes
"""A piece of a message: text, or the bytes of an encoded image (PNG, JPEG, whatever Pillow opens)."""


@dataclass(frozen=True, slots=True)
class Message:
    """A message to the model: a tool's result, or what a user says."""

    role: Literal["tool", "user"]
    parts: tuple[Part, ...]
    """Text and images in the order in which the model reads them."""
    own: tuple[int, ...] = ()
    """Indices of parts that are asyncrl's own words: environment.limits.tool_text_tokens does not cut them."""


@dataclass(frozen=True, slots=True)
class Observation:
    """The messages that follow a turn of the model, in their order; parallel calls give one `tool` message each."""

    messages: tuple[Message, ...]

    @property
    def images(self) -> tuple[bytes, ...]:
        """The images of all messages, in the order in which the model reads them."""
        return tuple(part for m in self.messages for part in m.parts if isinstance(part, bytes))


def key_of(observation: Observation) -> bytes:
    """16 bytes that are equal for equal observations."""
    digest = hashlib.blake2b(digest_size=16)
    for message in observation.messages:
        for part in message.parts:
            data = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
            digest.update(b"%d %d " % (isinstance(part, str), len(data)) + data)
    return digest.digest()


@dataclass(frozen=True, slots=True)
class PastTurn:
    """A turn of the policy in a history that an environment has edited."""

    turn: int | None
    """Index of a turn, from 0, whose sampled tokens stay as they are. None: `text` stands there."""
    text: str = ""
    shown: Observation | None = None
    """Observation that follows, with images that were shown before; None: the observation after that turn, or the new
    one behind the last turn."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """An environment's answer to one turn of the model."""

    observation: Observation | None
    """Next observation for the model; None where the episode is over."""
    reward: float = 0.0
    """Reward of this turn; a trajectory's reward is the sum over its turns and of the reward functions."""
    done: bool = False
    """Whether the episode is over. An observation beside it is not shown to the model."""
    state_key: bytes = b""
    """The state after this step, at most 16 bytes, for estimators that compare equal states; empty: unsaid."""
    info: dict[str, object] = field(default_factory=dict[str, object])
    """Small facts for the record: JSON of at most 4096 characters. `calls` is kept for the record
    of a turn's calls: dicts with name, arguments (JSON), error, kind (a CallErrorKind) and seconds."""
    history: tuple[PastTurn, ...] = ()
    """All that the next turn is to see between the prompt and the observation, in place of what was there; empty: it
    stays."""


def recorded_info(info: Mapping[str, Any]) -> str:
    """JSON of the environment's own facts; empty where there are none. Raises TypeError or ValueError for what is no
    JSON, too long, or too deep."""
    facts = {key: value for key, value in info.items() if key != "calls"}
    if not facts:
        return ""
    check_depth(facts)
    text = storable(json.dumps(facts, ensure_ascii=False, allow_nan=False))
    if len(text) > LONGEST_INFO:
        raise ValueError(f"info has {len(text)} characters as JSON, over the limit of {LONGEST_INFO}")
    return text


def check_history(history: Sequence[PastTurn], shown: Sequence[Observation], seen: Set[bytes]) -> None:
    """Raise UserError for an edited history that cannot be.

    `shown` is what each turn so far was followed by, nothing behind the newest; `seen` are all images of these.
    """
    for number, past in enumerate(history):
        if past.turn is not None and not 0 <= past.turn < len(shown):
            raise UserError(f"the edited history has turn {past.turn}, and {len(shown)} were taken")
        if number == len(history) - 1:
            if past.shown is not None:
                raise UserError("the last turn of the edited history has an observation beside the new one")
            return
        follows = past.shown
        if follows is None:
            follows = Observation(()) if past.turn is None else shown[past.turn]
        if not follows.messages:
            raise UserError(f"nothing follows turn {number} of the edited history, expected an observation")
        if not set(follows.images) <= seen:
            raise UserError(f"turn {number} of the edited history shows an image that no observation has shown")


def images_left_out(shown: Sequence[Observation], newest: Observation, keep_images: int) -> int:
    """Number of the oldest images of `shown` that `environment.keep_images` leaves out. The newest observation's are
    always shown."""
    if not keep_images:
        return 0
    count = sum(len(observation.images) for observation in shown)
    return max(0, count - max(0, keep_images - len(newest.images)))


def without_images(observation: Observation, count: int) -> Observation:
    """The observation with a text in the place of its first `count` images."""
    if not count:
        return observation
    left = count
    messages: list[Message] = []
    for message in observation.messages:
        parts: list[Part] = []
        for part in message.parts:
            is_gone = isinstance(part, bytes) and left > 0
            left -= is_gone
            parts.append(LEFT_OUT if is_gone else part)
        messages.append(Message(message.role, tuple(parts)))
    return Observation(tuple(messages))
