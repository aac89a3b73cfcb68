"""OpenAI's chat completions on a local port, for agents that call a model by themselves.

Each trajectory has an address with a secret of its own, `http://127.0.0.1:PORT/SECRET/v1`. A request is a turn of the
policy: the environment takes its new messages, and answers with the sampled turn. Tokens stay with the rollout server:
a request continues the conversation as it was, or says which turns stay and what replaces the others.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from asyncrl.environments.interface import Action
from asyncrl_plugins.tools.call_formats import Call
from asyncrl_plugins.tools.conversation import canonical, check_message
from protocol.nesting import read_json

MAX_BODY_BYTES = 100 << 20
IDLE_S = 600.0
"""Seconds after which a silent connection is closed."""


class Refused(Exception):
    """Request that is not served. Its reason goes to the agent with status 400."""


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
        """The completion of a request. One that is sent again is not sampled again. Raises Refused, and ValueError for
        messages that are none."""
        for name, plain in (("n", 1), ("stream", False)):
            if body.get(name) not in (None, plain):
                raise Refused(
                    f"{name}={body[name]!r:.80} is not served: a trajectory is one conversation, in whole answers"
                )
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise Refused("the request has no messages")
        for message in messages:
            check_message(message)
        key = json.dumps([canonical(message) for message in messages])
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

    def answer(self, asked: Asked, action: Action, found: Sequence[Call]) -> dict[str, Any]:
        """Answer a request with a turn and the calls in it; returns the message, as the agent sees it."""
        calls = [call for call in found if not call.error]
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
    """HTTP server of a process. Each session has an address with a secret of its own."""

    def __init__(self) -> None:
        self._sessions: dict[str, ChatSession] = {}
        self._base = ""

    async def start(self, host: str) -> None:
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_as_json])
        app.router.add_get("/{secret}/v1/models", self._models)
        app.router.add_post("/{secret}/v1/chat/completions", self._complete)
        runner = web.AppRunner(app, access_log=None, keepalive_timeout=IDLE_S)
        await runner.setup()
        await web.TCPSite(runner, host, 0).start()
        bound, port = runner.addresses[0][:2]
        self._base = f"http://{bound}:{port}"

    def open(self, session: ChatSession) -> str:
        """Return the address of a session, which clients take for a base URL."""
        assert self._base, "start() comes first"
        secret = secrets.token_hex(16)
        self._sessions[secret] = session
        return f"{self._base}/{secret}/v1"

    def close(self, url: str) -> None:
        session = self._sessions.pop(url.split("/")[3], None)
        if session is not None:
            session.close()

    def _session(self, request: web.Request) -> ChatSession:
        session = self._sessions.get(request.match_info["secret"])
        if session is None:
            raise web.HTTPNotFound(text="there is no such trajectory, or it has ended")
        return session

    async def _models(self, request: web.Request) -> web.Response:
        self._session(request)
        return web.json_response({"object": "list", "data": [{"id": "policy", "object": "model"}]})

    async def _complete(self, request: web.Request) -> web.Response:
        session = self._session(request)
        async with asyncio.timeout(IDLE_S):
            content = await request.read()
        try:
            body = read_json(content)
            return web.json_response(await session.complete(body if isinstance(body, dict) else {}))
        except (ValueError, Refused) as error:
            raise web.HTTPBadRequest(text=str(error)) from None


@web.middleware
async def _as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Give errors the form that clients of OpenAI's interface read."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        content = {"error": {"message": error.text, "type": "invalid_request_error"}}
        return web.json_response(content, status=error.status)
