"""OpenAI's chat completions on a local port, for agents that call a model by themselves.

Each trajectory has an address with a secret of its own in it, `http://127.0.0.1:PORT/SECRET/v1`. A request is a turn
of the policy: whoever owns the trajectory takes its new messages, samples the turn and answers. The tokens are those of
the rollout server, which never reads them from here: a request goes on from the conversation as it was, or says which
of its turns stay, and what is in the place of the others.
"""

from __future__ import annotations

import asyncio
import base64
import json
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from asyncrl.environments.interface import Action
from asyncrl.environments.observation import Message, Observation, Part, PastTurn

MAX_BODY_BYTES = 100 << 20
PATH = "/v1/chat/completions"
IDLE_S = 600.0
"""A connection without a request is closed after these seconds."""


class OtherConversation(Exception):
    """A request is none of its conversation: its prompt is another, or what follows cannot be shown to the policy."""


class Refused(Exception):
    """A request that is not served; the agent is told why with status 400."""


@dataclass
class Asked:
    """A request that waits for its turn."""

    key: str
    """Equal for a request that is sent again."""
    messages: list[dict[str, Any]]
    answer: asyncio.Future[dict[str, Any]] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class ChatSession:
    """The requests of one trajectory, in their order."""

    def __init__(self) -> None:
        self.requests: asyncio.Queue[Asked] = asyncio.Queue()
        self._pending: Asked | None = None
        self._answered: dict[str, dict[str, Any]] = {}
        self._closed = False

    async def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """The completion of a request. One that is sent again is not sampled again. Raises Refused."""
        for name, plain in (("n", 1), ("stream", False)):
            if body.get(name) not in (None, plain):
                raise Refused(
                    f"{name}={body[name]!r} is not served: a trajectory is one conversation, in whole answers"
                )
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise Refused("the request has no messages")
        key = json.dumps([_canonical(message) for message in messages])
        if key in self._answered:
            return self._answered[key]
        if self._closed:
            raise Refused("the trajectory has ended")
        if self._pending is None or self._pending.answer.done():
            self._pending = Asked(key, messages)
            self.requests.put_nowait(self._pending)
        elif self._pending.key != key:
            raise Refused("another request of this trajectory is being answered: ask for one turn after the other")
        return await asyncio.shield(self._pending.answer)

    def answer(self, asked: Asked, action: Action) -> dict[str, Any]:
        """Answer a request with a turn; returns the message, as the agent sees it."""
        calls = [call for call in action.calls if not call.error]
        message: dict[str, Any] = {"role": "assistant", "content": None if calls else action.text}
        if calls:
            message["tool_calls"] = [
                {
                    "id": f"call_{action.turn}_{call.id}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
                }
                for call in calls
            ]
        reason = "tool_calls" if calls else "stop"
        self._answered[asked.key] = completion = {
            "id": f"turn-{action.turn}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": "policy",
            "choices": [{"index": 0, "message": message, "finish_reason": reason}],
            "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0},
        }
        asked.answer.set_result(completion)
        return message

    def close(self) -> None:
        """The trajectory has ended: whoever still waits for a turn is told so."""
        self._closed = True
        if self._pending is not None and not self._pending.answer.done():
            self._pending.answer.set_exception(Refused("the trajectory has ended"))
            self._pending.answer.exception()  # seen, also where nobody waits


class ChatEndpoint:
    """The server of a process."""

    def __init__(self) -> None:
        self._sessions: dict[str, ChatSession] = {}
        self._server: asyncio.Server | None = None

    async def start(self, host: str) -> None:
        self._server = await asyncio.start_server(self._serve, host, 0, limit=1 << 16)

    def open(self, session: ChatSession) -> str:
        """The address of a session, which clients take for a base URL."""
        assert self._server is not None, "start() comes first"
        secret = secrets.token_hex(16)
        self._sessions[secret] = session
        host, port = self._server.sockets[0].getsockname()[:2]
        return f"http://{host}:{port}/{secret}/v1"

    def close(self, url: str) -> None:
        session = self._sessions.pop(url.split("/")[3], None)
        if session is not None:
            session.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """The requests of one connection."""
        try:
            while True:
                head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), IDLE_S)
                first, *lines = head.decode("latin-1").split("\r\n")
                pairs = (line.partition(":") for line in lines)
                headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
                length = headers.get("content-length", "0")
                if not length.isdigit() or int(length) > MAX_BODY_BYTES or "transfer-encoding" in headers:
                    await _reply(writer, 413, _error("a request has a Content-Length of at most 100 MiB"))
                    break
                body = await asyncio.wait_for(reader.readexactly(int(length)), IDLE_S)
                await _reply(writer, *await self._answer(first, body))
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, TimeoutError):
            pass  # the agent has gone, or is silent
        except asyncio.CancelledError:  # the loop ends; asyncio prints a traceback of a handler that ends as cancelled
            writer.transport.abort()
            return
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()

    async def _answer(self, first: str, body: bytes) -> tuple[int, dict[str, Any]]:
        method, path, *_ = [*first.split(" "), "", ""]
        _, secret, rest = (*path.split("/", 2), "", "")[:3]
        session = self._sessions.get(secret)
        if session is None:
            return 404, _error("there is no such trajectory, or it has ended")
        if method == "GET" and rest == "v1/models":
            return 200, {"object": "list", "data": [{"id": "policy", "object": "model"}]}
        if method != "POST" or f"/{rest}" != PATH:
            return 404, _error(f"{method} /{rest} is not served: POST {PATH} is")
        try:
            said = json.loads(body)
            return 200, await session.complete(said if isinstance(said, dict) else {})
        except (ValueError, Refused) as error:
            return 400, _error(str(error))


async def _reply(writer: asyncio.StreamWriter, status: int, content: dict[str, Any]) -> None:
    data = json.dumps(content).encode()
    head = f"HTTP/1.1 {status} .\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    await writer.drain()


def _error(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error"}}


# --- messages -------------------------------------------------------------------------------------


def first_messages(messages: list[dict[str, Any]], row: list[dict[str, Any]]) -> Observation | None:
    """Messages that an agent's first request adds to the row's own; None without any.

    The row's last message may be the beginning of the agent's, so also empty. Raises OtherConversation for another
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
    """All of them, as they were in the last request, with the answer to it."""
    turns: list[tuple[dict[str, Any], Observation]] = field(default_factory=list)
    """Each answer of the policy but the last, and what the agent first showed after it."""

    def goes_on(self, messages: list[dict[str, Any]]) -> tuple[Observation, tuple[PastTurn, ...]]:
        """The messages that a request adds, and where it has another history than there was, that one.

        Raises OtherConversation where it is none of this conversation.
        """
        known = list(map(_canonical, self.messages))
        history: tuple[PastTurn, ...] = ()
        if [_canonical(message) for message in messages[: len(known)]] == known:
            observation = _shown(messages[len(known) :])
        else:
            observation, history = self._edited(messages)
        self.turns.append((self.messages[-1], observation))
        return observation, history

    def _edited(self, messages: list[dict[str, Any]]) -> tuple[Observation, tuple[PastTurn, ...]]:
        for number, was in enumerate(self.prompt):
            is_now = messages[number] if number < len(messages) else None
            if is_now is None or _canonical(is_now) != _canonical(was):
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
            same = [n for n, (answer, _) in enumerate(known) if _canonical(answer) == _canonical(message)]
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


def _canonical(message: dict[str, Any]) -> Any:
    """Canonical form of the parts of a message that are compared."""
    if not isinstance(message, dict):
        raise Refused(f"a message is {type(message).__name__}, expected an object")
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
