"""Interface for authors of environments: `Start`, `Action`, and the two exceptions with a meaning.
Every other exception is a failure of the environment: a counted status, never a reward of 0.
"""

from __future__ import annotations

import io
import json
from collections.abc import Awaitable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol, SupportsFloat

from PIL import Image

from asyncrl.environments.observation import Message, Observation, Part, StepResult


class ToolError(Exception):
    """A mistake of the model: its text is the observation, and the episode goes on."""


class RefusedError(ToolError):
    """A mistake that asyncrl itself answers, in words that are short, and never cut."""


class EpisodeOver(Exception):
    """The end of the episode, with the reward of this turn and, if wanted, facts for the record."""

    def __init__(self, reward: SupportsFloat = 0.0, info: dict[str, Any] | None = None) -> None:
        if not isinstance(reward, SupportsFloat):  # said in the author's line, which raises it
            raise TypeError(f"EpisodeOver({reward!r:.80}): the reward of the turn must be a number")
        super().__init__(reward)
        self.reward = float(reward)
        self.info = info or {}


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
    """One turn of the policy, which is whole: one that the limit of length cuts ends the trajectory."""

    text: str
    """Sampled text, without special tokens."""
    turn: int = 0
    """Number of the turn, from 0."""


@dataclass(frozen=True)
class PromptTools:
    """Tools that the prompts of an environment tell of; equal on rollout server and learner."""

    schemas: tuple[dict[str, Any], ...]
    """Schemas in the form that chat templates take."""
    text: str
    """Text that ends the system message where the chat template does not list the tools."""
    markers: tuple[tuple[str, ...], ...] = ()
    """Strings for each form of a call that the environment reads: a chat template that asks for the form writes them
    beside its list of tools. Empty: no template does."""
    show: Literal["auto", "template", "text", "off"] = "auto"
    """`template`: listed by the chat template, which must have the markers; `text`: in the system message; `auto`: the
    former where it can be; `off`: prompts tell of no tools."""
    example: str = ""
    """A call with made-up values, for a reader."""

    @property
    def as_json(self) -> str:
        """Equal for equal prompts, so with keys in their order: a prompt writes them in it."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> PromptTools:
        values = json.loads(text)
        return cls(**values | {"schemas": tuple(values["schemas"]), "markers": tuple(map(tuple, values["markers"]))})


class Environment(Protocol):
    """A class with these methods, each plain or async; a new object for each trajectory.

    Named as `path/to/file.py:Class`. An object is made without arguments. `Config`, a pydantic model in the class,
    validates `environment.config`.
    Nothing may depend on the clock or on other trajectories: the same start and the same actions give the same bytes.

    A class may have two more methods, for base classes and plug-ins:

    `prepare(cls, config, image_rule)`, an async class method called once in each process, checks what can be checked
    before the first episode and returns PromptTools or None. It may set fields of `cls`, which is a copy of the class.
    `begin(start)` is called in place of `reset`, by a base class whose `reset` is its author's.
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
