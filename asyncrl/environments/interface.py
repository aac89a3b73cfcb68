"""Interface for authors of environments and tools: `Start`, `Action`, `Call`, and the two exceptions with a meaning.
Every other exception is a failure of the environment: a counted status, never a reward of 0.
"""

from __future__ import annotations

import io
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, SupportsFloat

from PIL import Image

from asyncrl.environments.observation import Message, Observation, Part, StepResult


class ToolError(Exception):
    """A mistake of the model: its text is the observation, and the episode goes on."""

    kind = "tool"
    """Kind for the record: whoever runs tools sets `malformed`, `unknown_tool`, `arguments` or `not_run`."""

    def of_kind(self, kind: str) -> ToolError:
        """Set the kind and return the error."""
        self.kind = kind
        return self


class EpisodeOver(Exception):
    """The end of the episode, with the reward of this turn and, if wanted, facts for the record."""

    def __init__(self, reward: SupportsFloat = 0.0, info: dict[str, Any] | None = None) -> None:
        if not isinstance(reward, SupportsFloat):  # said in the author's line, which raises it
            raise TypeError(f"EpisodeOver({reward!r:.80}): the reward of the turn must be a number")
        super().__init__(reward)
        self.reward = float(reward)
        self.info = info or {}


@dataclass(frozen=True)
class Call:
    """One call in a turn, as the policy wrote it."""

    id: str
    """Place among the calls of its turn, from `0`."""
    name: str
    """Name of the tool; empty where the text did not get as far."""
    arguments: dict[str, Any]
    """Arguments by parameter name, not validated yet; empty where there is an error."""
    error: str = ""
    """Reason why the text is no call, with the position: an observation for the model."""


@dataclass(frozen=True)
class Start:
    """Start of an episode. All trajectories of a ticket have the same but for `index`."""

    row: dict[str, Any] = field(default_factory=dict)
    """Columns of the data set's row."""
    messages: list[dict[str, Any]] = field(default_factory=list)
    """The row's prompt as chat messages."""
    images: list[bytes] = field(default_factory=list)
    """Encoded images of the prompt, in order of appearance."""
    seed: int = 0
    """Seed of the ticket. The opening must follow from row, seed and config alone: it is part of the prompt."""
    index: int = 0
    """Place of the trajectory in its group."""
    config: Any = None
    """`environment.config`: an object of the class's `Config`, or a dict where it has none."""

    def image(self, number: int) -> Image.Image:
        """Pixels of an image of the prompt."""
        return Image.open(io.BytesIO(self.images[number])).convert("RGB")

    def columns(self, names: Sequence[str], setting: str) -> dict[str, Any]:
        """Given columns of the row. KeyErrors name the `setting` that has the names."""
        missing = [name for name in names if name not in self.row]
        if missing:
            raise KeyError(f"{setting} names {missing[0]!r}, which the row has not")
        return {name: self.row[name] for name in names}


@dataclass(frozen=True)
class Action:
    """One turn of the policy."""

    text: str
    """Sampled text, without special tokens."""
    calls: tuple[Call, ...] = ()
    """Calls that the call format (`environment.call_format`) found in the text."""
    turn: int = 0
    """Number of the turn, from 0."""
    finish_reason: str = "stop"
    """`stop`, `stop_string`, or `length` for a turn that was cut, which has no calls."""


class Environment(Protocol):
    """A class with these methods, each plain or async; a new object for each trajectory.

    Named as `path/to/file.py:Class`. An object is made without arguments. `Config`, a pydantic model in the class,
    validates `environment.config`. Methods marked with `@tool` become tools (`ToolEnvironment` calls them).
    Nothing may depend on the clock or on other trajectories: the same start and the same actions give the same bytes.
    """

    def reset(self, start: Start) -> Observation | Awaitable[Observation | None] | None:
        """Begin; what it returns is the opening, the end of the prompt's last user message."""
        ...

    def step(self, action: Action) -> StepResult | Awaitable[StepResult]:
        """The consequence of one turn. Raises ToolError, EpisodeOver."""
        ...

    def close(self) -> Awaitable[None] | None:
        """The trajectory has ended, or was given up. May be left out."""
        ...


def observe(*parts: Part | Image.Image, role: str = "tool") -> Observation:
    """An observation of one message; images as PIL images or as encoded bytes. `role` is `tool` or `user`; an opening
    is the user's in any case."""
    encoded = tuple(png_bytes(part) if isinstance(part, Image.Image) else part for part in parts)
    return Observation((Message("user" if role == "user" else "tool", encoded),))


def png_bytes(image: Image.Image) -> bytes:
    """PNG bytes, equal for equal pixels."""
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, format="PNG")
    return buffer.getvalue()
