"""`ToolEnvironment`: an environment made of tools, and the base of environments whose actions are calls."""

from __future__ import annotations

import io
import json
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Protocol, TypeVar

from PIL import Image
from pydantic import BaseModel

from asyncrl.environments.image_rule import ImageRule
from asyncrl.environments.interface import Action, EpisodeOver, PromptTools, RefusedError, Start, ToolError
from asyncrl.environments.loading import opening_of, waited
from asyncrl.environments.observation import Message, Observation, Part, StepResult, key_of
from asyncrl_plugins.tools.call_formats import Call, CallReader
from asyncrl_plugins.tools.prompt import ToolSettings, prompt_tools, show_wish
from asyncrl_plugins.tools.schema import Tool, tool_of, tools_by_name, unknown_tool
from protocol.messages.groups import CallErrorKind

F = TypeVar("F", bound=Callable[..., Any])
NUDGE = "Call one of the tools, or give your answer."


def tool(function: F) -> F:
    """Mark a method as a tool."""
    function.__asyncrl_tool__ = True  # type: ignore[attr-defined]
    return function


class CallError(RefusedError):
    """A call that no tool was asked for, with its kind for the record."""

    def __init__(self, text: str, kind: CallErrorKind) -> None:
        super().__init__(text)
        self.kind: CallErrorKind = kind


@dataclass(frozen=True)
class ShownImage:
    """An image that the policy has seen, as it has seen it."""

    data: bytes
    """Encoded bytes after the rule of sizes."""

    @cached_property
    def pixels(self) -> Image.Image:
        return Image.open(io.BytesIO(self.data)).convert("RGB")

    @property
    def size(self) -> tuple[int, int]:
        """Width and height."""
        return self.pixels.size


@dataclass
class ToolContext:
    """Argument `ctx` of a tool: the trajectory so far, hidden from the policy."""

    start: Start
    images: list[ShownImage] = field(default_factory=list)
    """Images by number: those of the prompt, then what tools have shown, in order of appearance."""
    state: dict[str, Any] = field(default_factory=dict)
    """State that tools keep until the trajectory ends."""
    rng: random.Random = field(default_factory=random.Random)
    """Seeded by the ticket's seed and the trajectory's place in its group."""
    reward: float = 0.0
    """Reward of this turn; tools add to it."""
    answered: int = 0
    """Calls so far that a tool has answered without an error."""
    info: dict[str, Any] = field(default_factory=dict)
    """Small facts for the record, in the `info` of every turn's result."""

    @property
    def row(self) -> dict[str, Any]:
        """Columns of the data set's row."""
        return self.start.row

    @property
    def settings(self) -> Mapping[str, Any]:
        """`environment.config.settings` of `name: tools`; empty for a class."""
        return getattr(self.start.config, "settings", {})

    def image(self, number: int) -> ShownImage:
        """The image of this number. Raises RefusedError, which names those that there are."""
        if not 0 <= number < len(self.images):
            there = f"numbers are 0 to {len(self.images) - 1}" if self.images else "there are no images"
            raise RefusedError(f"there is no image {number}: {there}")
        return self.images[number]


class ToolSet(Protocol):
    """A class with methods marked by `@tool`, of which each trajectory has an object of its own."""

    def start(self, ctx: ToolContext) -> None: ...


class ToolEnvironment:
    """Runs the calls of each turn in their order, and makes one message of each result.

    An episode ends at the first turn without a call: its text is the answer, which reward functions score. A class
    derived from it marks methods with `@tool`; they keep the state in `self`, add
    to `ctx.reward`, raise ToolError for a mistake of the policy and EpisodeOver(reward) at the end. `reset` may return
    an opening.

    Example:
        class Guess(ToolEnvironment):
            def reset(self, start):
                self.number = random.Random(start.seed).randrange(8)
                return observe("Guess my number, 0 to 7.")

            @tool
            def guess(self, number: int) -> str:
                \"\"\"Guess the number.

                number: your guess.
                \"\"\"
                if number == self.number:
                    raise EpisodeOver(1.0)
                return "higher" if number < self.number else "lower"
    """

    functions: ClassVar[Sequence[Callable[..., Any] | type[Any]]] = ()
    """Functions and tool sets beside the marked methods. An async `check(settings)`, an attribute of a function, raises
    UserError for what it cannot do on this machine or with these settings."""
    Config: ClassVar[type[BaseModel]] = ToolSettings
    """Model of `environment.config`. One that is not derived from ToolSettings leaves the class as it is written."""
    call_format: ClassVar[str] = "tool_call"
    """Form of a call where `environment.config.call_format` is auto."""
    show_tools: ClassVar[bool] = True
    """Whether prompts list the tools where `environment.config.show_tools` is auto; False: the class says how to
    act."""
    end: ClassVar[str] = "answer"
    """Meaning of a turn without a call: the final `answer`, or once, with `nudge`, a reason to ask for a call."""
    calls_per_turn: ClassVar[int] = 4
    """`environment.config.calls_per_turn`; each call over it gets an error for a result."""
    image_rule: ClassVar[ImageRule] = ImageRule()

    reader: ClassVar[CallReader]
    tools: dict[str, Tool]
    ctx: ToolContext

    @classmethod
    async def prepare(cls, config: Any, image_rule: ImageRule) -> PromptTools | None:
        """List the tools and check that calls of them can be written. Raises UserError."""
        for function in cls.functions:
            check = getattr(function, "check", None)
            if check is not None:
                await check(getattr(config, "settings", {}))
        cls.image_rule = image_rule
        cls.calls_per_turn = getattr(config, "calls_per_turn", cls.calls_per_turn)
        tools = tools_by_name(await cls.list_tools(config)).values()
        cls.reader = CallReader.of(config, cls.call_format, tools)
        return prompt_tools(tools, cls.reader, show_wish(config, cls.show_tools))

    @classmethod
    async def list_tools(cls, config: Any) -> list[Tool]:
        """The tools, as the policy sees them. An adapter asks its server."""
        return [tool_of(each) for each in (*marked_methods(cls), *_functions_of(cls.functions))]

    async def begin(self, start: Start) -> Observation | None:
        """Start the trajectory: context, tool sets, then the class's own `reset`."""
        rng = random.Random(f"{start.seed} {start.index}")
        self.ctx = ToolContext(start, [ShownImage(data) for data in start.images], rng=rng)
        made: list[Any] = [each() if isinstance(each, type) else each for each in self.functions]
        for tool_set in made:
            if marked_methods(tool_set):
                await waited(tool_set.start(self.ctx))
        self.tools = {each.name: each for each in self.own_tools(made)}
        self._nudged = False
        opening = opening_of(await waited(self.reset(start)), type(self), self.image_rule)
        self.ctx.images += [ShownImage(data) for data in opening.images] if opening else []
        return opening

    def own_tools(self, made: list[Any]) -> list[Tool]:
        """The tools of this trajectory: marked methods, functions, and the tool sets that were `made` for it."""
        return [tool_of(each) for each in (*marked_methods(self), *_functions_of(made))]

    def reset(self, start: Start) -> Any:
        """Begin; what it returns is the opening."""
        return None

    async def step(self, action: Action) -> StepResult:
        """Run the turn's calls."""
        calls = self.reader.calls(action)
        if not calls:
            return self.without_call(action)
        self.ctx.reward = 0.0
        messages: list[Message] = []
        records: list[dict[str, object]] = []
        over: EpisodeOver | None = None
        for number, call in enumerate(calls):
            began = time.perf_counter()
            parts: tuple[Part, ...] = ()
            own: tuple[int, ...] = ()
            error, kind = "", ""
            try:
                if number >= self.calls_per_turn:
                    raise CallError(f"not run: a turn may have {self.calls_per_turn} calls", "not_run")
                parts = await self._run(call)
                self.ctx.answered += 1
            except ToolError as mistake:
                error = str(mistake) or "the call failed"
                kind = mistake.kind if isinstance(mistake, CallError) else "tool"
                parts, own = (f"Error: {error}",), (0,) if isinstance(mistake, RefusedError) else ()
            except EpisodeOver as end:
                over = end
            records.append(call_record(call, error, kind, parts, time.perf_counter() - began))
            if over is not None:
                break
            messages.append(Message("tool", parts, own))
            self.ctx.images += [ShownImage(part) for part in parts if isinstance(part, bytes)]
        info: dict[str, object] = {**self.ctx.info, "calls": records}
        if over is not None:
            return StepResult(None, self.ctx.reward + over.reward, True, info=info | over.info)
        observation = Observation(tuple(messages))
        return StepResult(observation, self.ctx.reward, False, self.state_key(observation), info)

    def without_call(self, action: Action) -> StepResult:
        """Result of a turn without a call: the end, or once a request for a call where `end` is nudge."""
        if self.end == "nudge" and not self._nudged:
            self._nudged = True
            return StepResult(Observation((Message("user", (NUDGE,), own=(0,)),)))
        return StepResult(None, done=True, info=dict(self.ctx.info))

    def state_key(self, observation: Observation) -> bytes:
        """Key of the current state, for estimators that compare equal states; made from the observation unless
        overridden."""
        return key_of(observation)

    def close(self) -> Any:
        """The trajectory has ended."""

    async def call(self, tool: Tool, arguments: dict[str, Any]) -> Any:
        """Run one tool with valid arguments. Raises what it raises."""
        assert tool.function is not None, "an adapter overrides this"
        context = {"ctx": self.ctx} if tool.takes_context else {}
        return await waited(tool.function(**arguments, **context))

    async def _run(self, call: Call) -> tuple[Part, ...]:
        if call.error:
            raise CallError(call.error, "malformed")
        if call.name not in self.tools:
            raise CallError(unknown_tool(call.name, self.tools), "unknown_tool")
        tool = self.tools[call.name]
        try:
            arguments = tool.validate(call.arguments)
        except ToolError as mistake:
            raise CallError(str(mistake), "arguments") from None
        return parts_of(await self.call(tool, arguments), tool.name, self.image_rule)


def marked_methods(owner: Any) -> list[Callable[..., Any]]:
    """Methods of a class or object that `@tool` has marked, in the order in which they are written."""
    classes = reversed((owner if isinstance(owner, type) else type(owner)).__mro__)
    names = dict.fromkeys(name for each in classes for name, value in vars(each).items() if _is_marked(value))
    if isinstance(owner, type):
        return [getattr(object.__new__(owner), name) for name in names]  # bound, so that `self` is no parameter
    return [getattr(owner, name) for name in names]


def parts_of(result: Any, tool: str, rule: ImageRule) -> tuple[Part, ...]:
    """A result as parts of a message: text, numbers and JSON as text, PIL images and encoded bytes as images, lists of
    them one behind the other.

    Raises ToolError for an image that cannot be shown, TypeError for what is none of these.
    """
    if isinstance(result, str):
        return (result,)
    if isinstance(result, bytes | Image.Image):
        return (rule.fit(result),)
    if isinstance(result, Observation):
        return tuple(rule.fit(p) if isinstance(p, bytes) else p for message in result.messages for p in message.parts)
    if isinstance(result, list | tuple) and any(isinstance(part, str | bytes | Image.Image) for part in result):
        return tuple(part for each in result for part in parts_of(each, tool, rule))
    try:
        return (json.dumps(result, ensure_ascii=False, allow_nan=False, default=_plain_number),)
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(
            f"tool {tool} returned {type(result).__name__}, of which no text or image can be made ({error}). "
            "Return text, a number, JSON, an image, or a list of them"
        ) from None


def _plain_number(value: Any) -> Any:
    """A scalar of numpy or torch as a number."""
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        return value.item()
    raise TypeError(f"{type(value).__name__} is no JSON")


def _is_marked(value: Any) -> bool:
    return getattr(value, "__asyncrl_tool__", False) is True


def _functions_of(functions: Sequence[Any]) -> Iterator[Callable[..., Any]]:
    for each in functions:
        if isinstance(each, type) or marked_methods(each):
            yield from marked_methods(each)
        else:
            yield each


def call_record(
    call: Call, error: str, kind: str, parts: Sequence[Part] = (), seconds: float = 0.0
) -> dict[str, object]:
    """A call and what became of it, for the `calls` of a result's info."""
    kinds = {"image" if isinstance(part, bytes) else "text" for part in parts}
    return {
        "name": call.name,
        "arguments": json.dumps(call.arguments, ensure_ascii=False, default=str) if call.arguments else "",
        "error": error,
        "kind": kind,
        "output": "error" if error else "+".join(sorted(kinds)),
        "seconds": seconds,
    }
