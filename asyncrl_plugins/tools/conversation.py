"""Conversations of agents as observations: messages that a request adds, and histories that it edits."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass, field
from typing import Any

from asyncrl.environments.observation import Message, Observation, Part, PastTurn


class OtherConversation(Exception):
    """A request that does not continue its conversation: another prompt, or messages that cannot be shown."""


def first_messages(messages: list[dict[str, Any]], row: list[dict[str, Any]]) -> Observation | None:
    """Parts of an agent's first request beyond the row's own messages; None where there are none.

    The row's last message may be a beginning of the agent's, even an empty one. Raises OtherConversation for another
    prompt.
    """
    rest: list[Part] = []
    for number, message in enumerate(messages):
        parts = parts_of(message)
        if number >= len(row):
            if message["role"] != "user":
                raise OtherConversation(_another_prompt(number, message, "nothing"))
            rest += parts
            continue
        said, known = "".join(part if isinstance(part, str) else "<image>" for part in parts), row[number]
        is_last = number == len(row) - 1 and known["role"] == "user"
        begins = said.startswith(known["content"]) if is_last else said == known["content"]
        if _role(message) != known["role"] or not begins:
            raise OtherConversation(_another_prompt(number, message, f"{known['role']}: {known['content']!r:.200}"))
        if is_last:
            rest += _behind(parts, len(known["content"]))
    if len(messages) < len(row):
        raise OtherConversation(f"the agent's first request has {len(messages)} messages, and the row {len(row)}")
    return Observation((Message("user", tuple(rest)),)) if rest else None


@dataclass
class Conversation:
    """An agent's conversation as the policy has it."""

    prompt: list[dict[str, Any]]
    """Messages of the first request."""
    messages: list[dict[str, Any]]
    """Messages of the last request, with the answer to it."""
    turns: list[tuple[dict[str, Any], Observation]] = field(default_factory=list)
    """Each answer of the policy but the last, and what the agent first showed after it."""

    def goes_on(self, messages: list[dict[str, Any]]) -> tuple[Observation, tuple[PastTurn, ...]]:
        """Return the messages that a request adds, and the history that it has where it edits the one that there was.

        Raises OtherConversation for a request of another conversation.
        """
        known = list(map(canonical, self.messages))
        history: tuple[PastTurn, ...] = ()
        if [canonical(message) for message in messages[: len(known)]] == known:
            observation = _shown(messages[len(known) :])
        else:
            observation, history = self._edited(messages)
        self.turns.append((self.messages[-1], observation))
        return observation, history

    def _edited(self, messages: list[dict[str, Any]]) -> tuple[Observation, tuple[PastTurn, ...]]:
        for number, was in enumerate(self.prompt):
            is_now = messages[number] if number < len(messages) else None
            if is_now is None or canonical(is_now) != canonical(was):
                raise OtherConversation(
                    f"message {number} of the agent's request is {json.dumps(is_now)[:200]}, and was "
                    f"{json.dumps(was)[:200]}. The messages of the first request are the prompt of the trajectory: an "
                    "agent may only change what comes after them"
                )
        exchanges: list[tuple[dict[str, Any], list[dict[str, Any]]]] = []
        for message in messages[len(self.prompt) :]:
            if message.get("role") == "assistant":
                exchanges.append((message, []))
            elif not exchanges:
                raise OtherConversation(
                    "behind the messages of the agent's first request stands no answer of the policy"
                )
            else:
                exchanges[-1][1].append(message)
        if not exchanges:
            raise OtherConversation("the agent's request adds nothing to its first one")
        known: list[tuple[dict[str, Any], Observation | None]] = [*self.turns, (self.messages[-1], None)]
        past: list[PastTurn] = []
        turn, observation = -1, Observation(())
        for number, (message, behind) in enumerate(exchanges):
            observation = _shown(behind)
            shown = None if number == len(exchanges) - 1 else observation
            same = [n for n, (answer, _) in enumerate(known) if canonical(answer) == canonical(message)]
            if same:
                later = [
                    n for n in same if n > turn
                ] or same  # equal answers: in their order, and as they were followed
                turn = next((n for n in later if known[n][1] == shown), later[0])
                past.append(PastTurn(turn, shown=None if known[turn][1] == shown else shown))
            elif message.get("tool_calls"):
                raise OtherConversation(f"the policy has made no such calls: {json.dumps(message)[:200]}")
            else:
                text = "".join(part for part in parts_of(message) if isinstance(part, str))
                past.append(PastTurn(None, text, shown))
        return observation, tuple(past)


def _shown(messages: list[dict[str, Any]]) -> Observation:
    """Messages of tools and users, at least one. Raises OtherConversation for others."""
    if not messages or any(message.get("role") not in ("tool", "user") for message in messages):
        raise OtherConversation(
            f"behind an answer of the policy the agent has the messages {[m.get('role') for m in messages]}, "
            "expected those of tools and users, at least one"
        )
    return Observation(
        tuple(
            Message("tool" if message["role"] == "tool" else "user", tuple(parts_of(message))) for message in messages
        )
    )


def parts_of(message: dict[str, Any]) -> list[Part]:
    """Texts and images of a message. Raises OtherConversation for parts that cannot be shown."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return [content] if content else []
    found: list[Part] = []
    for part in content:
        address = part.get("image_url", {}).get("url", "") if part.get("type") == "image_url" else ""
        if part.get("type") == "text":
            found.append(part["text"])
        elif address.startswith("data:"):
            found.append(base64.b64decode(address.partition("base64,")[2]))
        else:
            raise OtherConversation(
                f"a message has the part {json.dumps(part)[:200]}: texts and images as data: are read"
            )
    return found


def _behind(parts: list[Part], length: int) -> list[Part]:
    """Parts without the first so many characters; an image has those of its placeholder."""
    left: list[Part] = []
    for part in parts:
        size = len(part) if isinstance(part, str) else len("<image>")
        if length >= size:
            length -= size
            continue
        left.append(part[length:] if isinstance(part, str) else part)
        length = 0
    return left


def _role(message: dict[str, Any]) -> str:
    return "system" if message.get("role") == "developer" else str(message.get("role"))


def check_message(message: Any) -> None:
    """Raise ValueError, naming field and type, for what is no message of OpenAI's chat completions. Parts and fields
    that nobody reads here may be anything."""
    _expect(message, (dict,), "a message")
    _expect_text(message.get("role"), "`role` of a message")
    content = _expect(message.get("content"), (str, list, type(None)), "`content` of a message")
    for part in content if isinstance(content, list) else ():
        kind = _expect_text(_expect(part, (dict,), "a part of `content`").get("type"), "`type` of a part")
        if kind == "text":
            _expect_text(part.get("text"), "`text` of a part")
        elif kind == "image_url":
            address = _expect(part.get("image_url"), (dict,), "`image_url` of a part").get("url")
            base64.b64decode(_expect_text(address, "`url` of an image").partition("base64,")[2])
    if isinstance(content, str):
        _expect_text(content, "`content` of a message")
    for call in _expect(message.get("tool_calls"), (list, type(None)), "`tool_calls` of a message") or ():
        function = _expect(_expect(call, (dict,), "a tool call").get("function"), (dict,), "`function` of a tool call")
        for name in ("name", "arguments"):
            _expect_text(function.get(name), f"`{name}` of a tool call")


def _expect(value: Any, kinds: tuple[type, ...], what: str) -> Any:
    if not isinstance(value, kinds):
        names = " or ".join("null" if kind is type(None) else kind.__name__ for kind in kinds)
        raise ValueError(f"{what} is {type(value).__name__}, expected {names}")
    return value


def _expect_text(value: Any, what: str) -> str:
    text: str = _expect(value, (str,), what)
    if not text.isascii():
        text.encode()  # half a surrogate pair is no text
    return text


def canonical(message: dict[str, Any]) -> Any:
    """Comparable form of a message, equal for equal ones."""
    content = message.get("content") or ""
    if isinstance(content, list):
        texts = [part.get("text", "") if part.get("type") == "text" else json.dumps(part) for part in content]
        content = "".join(texts)
    calls = []
    for call in message.get("tool_calls") or ():
        function = call.get("function", {})
        calls.append([call.get("id"), function.get("name"), function.get("arguments")])
    return [_role(message), content, calls, message.get("tool_call_id")]


def _another_prompt(number: int, message: dict[str, Any], known: str) -> str:
    return (
        f"message {number} of the agent's first request is {json.dumps(message)[:200]}, and the row has {known} there. "
        "Give the row the agent's system message and the beginning of its user message, or an empty prompt"
    )
