"""`name: openenv`: an environment behind an OpenEnv server, by its WebSocket protocol.

    environment:
      name: openenv
      config: {url: "http://127.0.0.1:8000", images: [screenshot]}

The action of the server is a tool, by default named `act`, whose parameters are the action's fields. Each trajectory
has a session of its own. Needs `pip install asyncrl[openenv]` (websockets alone); the server has packages of its own.
"""

from __future__ import annotations

import base64
import json
import urllib.request
from typing import Any, ClassVar

from pydantic import Field

from asyncrl import user_functions
from asyncrl.environments.interface import EpisodeOver, Start, observe
from asyncrl.environments.observation import Observation
from asyncrl.errors import UserError
from asyncrl.user_functions import one_line
from asyncrl_plugins.tools.environment import CallError, ToolEnvironment
from asyncrl_plugins.tools.prompt import ToolSettings
from asyncrl_plugins.tools.schema import Tool
from protocol.nesting import read_json
from protocol.values import as_json

SCHEMA_S = 20.0
"""Seconds for the server to say what its actions are."""
MAX_MESSAGE_BYTES = 100 << 20
"""Limit of one message, as of the protocol's own client."""
REFUSED = "VALIDATION_ERROR"
"""The server's code for an action that is not of its schema: the policy's mistake."""


class OpenEnvEnvironment(ToolEnvironment):
    """Calls of the policy are steps. An observation is shown as its JSON, images of it at the end."""

    class Config(ToolSettings):
        url: str
        """`http://host:port` of the server, which must allow as many sessions as there are episodes at a time."""
        tool: str = "act"
        """Name of the action among the policy's tools."""
        images: list[str] = Field(default_factory=list)
        """Fields of the observation that are images: base64, with or without `data:image/png;base64,`."""
        text: list[str] | None = None
        """Fields that are shown as text; all others of the observation where this is left out."""
        observe: str = ""
        """`file.py:function` from an observation, a dict, to text, an image, or a list of them."""
        row_kwargs: list[str] = Field(default_factory=list)
        """Columns of the row that the server's `reset` gets, beside `seed`."""

    listed: ClassVar[list[Tool]] = []
    shown: ClassVar[Any] = None
    """Function that `observe` names."""

    @classmethod
    async def list_tools(cls, config: Any) -> list[Tool]:
        _connect()
        if not config.url.startswith(("http://", "https://")):
            raise UserError(
                f"environment.config.url is {config.url!r}: write the server's http:// or https:// address, such as "
                "http://127.0.0.1:8000; the WebSocket's is made of it"
            )
        if config.observe:
            cls.shown = staticmethod(user_functions.resolve(config.observe, {}, "environment.config.observe"))
        try:
            with urllib.request.urlopen(f"{config.url.rstrip('/')}/schema", timeout=SCHEMA_S) as response:
                action = read_json(response.read(MAX_MESSAGE_BYTES))["action"]
        except Exception as error:
            raise UserError(
                f"the OpenEnv server {config.url} does not say what its actions are: {one_line(error)}"
            ) from error
        properties = {name: what for name, what in action.get("properties", {}).items() if name != "metadata"}
        schema = {**action, "properties": properties}
        for unneeded in ("title", "description", "additionalProperties"):
            schema.pop(unneeded, None)
        cls.listed = [Tool(config.tool, action.get("description", "Act."), schema)]
        return cls.listed

    def own_tools(self, made: list[Any]) -> list[Tool]:
        return self.listed

    async def reset(self, start: Start) -> Observation:
        self._config = config = start.config
        columns = start.columns(config.row_kwargs, "environment.config.row_kwargs")
        address = config.url.rstrip("/").replace("http", "ws", 1) + "/ws"
        self._socket = await _connect()(address, max_size=MAX_MESSAGE_BYTES)
        answer = await self._ask("reset", {"seed": start.seed % 2**31, **as_json(columns)})
        return observe(*self._seen(answer["observation"]), role="user")

    async def call(self, tool: Tool, arguments: dict[str, Any]) -> Any:
        answer = await self._ask("step", arguments)
        reward = float(answer.get("reward") or 0.0)
        if answer.get("done"):
            raise EpisodeOver(reward)
        self.ctx.reward += reward
        return self._seen(answer["observation"])

    async def close(self) -> None:
        if hasattr(self, "_socket"):
            await self._socket.close()

    async def _ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        await self._socket.send(json.dumps({"type": kind, "data": data}))
        answer = read_json(await self._socket.recv())
        told = answer.get("data", {}) if isinstance(answer, dict) else None
        if not isinstance(told, dict):
            raise ValueError(f"the OpenEnv server answered {answer!r:.200}, expected an object with `data`")
        if answer.get("type") == "error":
            if kind == "step" and told.get("code") == REFUSED:
                raise CallError(f"{self._config.tool}: {told.get('message', ''):.500}", "arguments")
            raise ConnectionError(f"the OpenEnv server says {told.get('code')}: {told.get('message')}")
        if not isinstance(told.get("observation"), dict):
            raise ValueError(f"the OpenEnv server answered {answer!r:.200}, which has no observation")
        return told

    def _seen(self, observation: dict[str, Any]) -> list[Any]:
        config = self._config
        if config.observe:
            parts = self.shown(observation)
            return list(parts) if isinstance(parts, list | tuple) else [parts]
        names = [name for name in observation if name not in config.images] if config.text is None else config.text
        missing = [name for name in (*names, *config.images) if name not in observation]
        if missing:
            raise KeyError(f"the observation has no field {missing[0]!r}. It has {', '.join(observation)}")
        said = {name: observation[name] for name in names}
        only = next(iter(said.values())) if len(said) == 1 else None
        text = only if isinstance(only, str) else json.dumps(said, ensure_ascii=False)
        images = [_image(observation[name]) for name in config.images if observation[name] is not None]
        return [*([text] if said else []), *images]


def _image(value: Any) -> bytes:
    if not isinstance(value, str):
        raise TypeError(f"an image of the observation is {type(value).__name__}, expected base64: use `observe`")
    return base64.b64decode(value.partition("base64,")[2] or value)


def _connect() -> Any:
    try:
        from websockets.asyncio.client import connect
    except ImportError as error:
        raise UserError(
            "environment.name is openenv, but the package websockets is not installed: pip install 'asyncrl[openenv]'"
        ) from error
    return connect
