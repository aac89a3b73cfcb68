"""`name: mcp`: the tools of an MCP server, by its command (started inside the worker, with its limits) or its address.

    environment:
      name: mcp
      config: {command: [python, my_server.py]}

Each trajectory has a session of its own, and with a command a process, unless `shared` gives a worker one for all. The
tools are listed when a worker starts; a lost one whose successor lists others stops the run. Needs
`pip install asyncrl[mcp]`.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import sys
import threading
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar

from pydantic import Field, model_validator

from asyncrl.environments.interface import RefusedError, Start, ToolError
from asyncrl.environments.observation import Observation
from asyncrl.errors import UserError
from asyncrl.user_functions import one_line
from asyncrl_plugins.tools.environment import ToolEnvironment
from asyncrl_plugins.tools.prompt import ToolSettings
from asyncrl_plugins.tools.schema import Tool

INVALID_PARAMS = -32602
"""JSON-RPC's code for arguments that the server refuses: the policy's mistake."""
CONNECTION_CLOSED = -32000
"""The package's code for a server that has gone."""
START_S = LIST_S = 30.0
"""Longest times until a server is there, and until it lists its tools."""
STOP_S, LAST_WORDS_S = 8.0, 1.0
"""Longest times for the end of a lost server's process, and for what it has written to arrive."""


class McpEnvironment(ToolEnvironment):
    """Calls of the policy are calls of the server's tools; what the server says is an error is text for the policy."""

    class Config(ToolSettings):
        command: list[str] = Field(default_factory=list)
        """Program and arguments of a server that speaks over stdin and stdout."""
        url: str = ""
        """Address of a server that speaks streamable HTTP."""
        env: dict[str, str] = Field(default_factory=dict)
        """Environment variables of the command, beside PATH, HOME and the like."""
        shared: bool = False
        """One session for all trajectories of a worker, for a server that keeps nothing of a session: a process for
        each trajectory takes as long to start as the server takes to load."""
        tools: list[str] = Field(default_factory=list)
        """Names of the tools that the policy may call; empty: all of them."""

        @model_validator(mode="after")
        def _check(self) -> McpEnvironment.Config:
            if bool(self.command) == bool(self.url):
                raise ValueError("give either a command or a url")
            return self

    listed: ClassVar[list[Tool]] = []

    opening: ClassVar[asyncio.Lock] = asyncio.Lock()
    session: ClassVar[McpSession | None] = None
    """Session of all trajectories of this process, with `shared`."""

    @classmethod
    async def list_tools(cls, config: Any) -> list[Tool]:
        found: list[Any] = []
        cursor = session = None
        try:
            session = await McpSession.open(config)
            while True:
                page = await session.ask(lambda client, cursor=cursor: client.list_tools(cursor=cursor), LIST_S)
                found += page.tools
                cursor = page.next_cursor
                if cursor is None:
                    break
        except ConnectionError as error:
            raise UserError(f"{error}. Start it by itself, and mend what it says") from None
        finally:
            if session is not None:
                await session.close()
        missing = [name for name in config.tools if name not in {tool.name for tool in found}]
        if missing:
            there = ", ".join(tool.name for tool in found)
            raise UserError(f"environment.config.tools has {missing[0]!r}, but the MCP server's tools are {there}")
        chosen = [tool for tool in found if not config.tools or tool.name in config.tools]
        cls.listed = [Tool(tool.name, tool.description or "", dict(tool.input_schema)) for tool in chosen]
        return cls.listed

    def own_tools(self, made: list[Any]) -> list[Tool]:
        return self.listed

    async def reset(self, start: Start) -> Observation | None:
        cls = type(self)
        if not start.config.shared:
            self._session = await McpSession.open(start.config)
            return None
        async with cls.opening:  # the first one of several trajectories opens it for all
            if cls.session is None or cls.session.has_ended:
                cls.session = await McpSession.open(start.config)
        self._session = cls.session
        return None

    async def close(self) -> None:
        if hasattr(self, "_session") and self._session is not type(self).session:
            await self._session.close()

    async def call(self, tool: Tool, arguments: dict[str, Any]) -> Any:
        from mcp import MCPError

        _check(arguments, tool)
        try:
            result = await self._session.ask(lambda client: client.call_tool(tool.name, arguments))
        except MCPError as error:
            if error.code == INVALID_PARAMS:
                raise ToolError(f"{tool.name}: {error.message}") from None
            raise
        parts = [part for block in result.content for part in _parts(block)]
        if result.is_error:
            raise ToolError("\n".join(part for part in parts if isinstance(part, str)) or f"{tool.name} failed")
        return parts or json.dumps(result.structured_content)


class McpSession:
    """A session with the server. Its task groups begin and end in a task of its own, so that trajectories may share it
    and one of them may open it for all."""

    def __init__(self, config: Any) -> None:
        self._config = config
        self._words = LastWords()
        self._client: Any = None
        self._is_over = asyncio.Event()
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._live())

    @classmethod
    async def open(cls, config: Any) -> McpSession:
        """Raises ConnectionError with the server's last words, and after START_S; UserError without the package."""
        session = cls(config)
        try:
            async with asyncio.timeout(START_S):
                await asyncio.shield(session._ready)
        except TimeoutError:
            raise await session._lost(f"does not answer within {START_S:g} s") from None
        except UserError:
            raise
        except Exception as error:
            raise await session._lost(f"does not start ({one_line(error)})") from error
        except BaseException:
            session._task.cancel()
            raise
        return session

    @property
    def has_ended(self) -> bool:
        return self._task.done() or self._is_over.is_set()

    async def ask(self, request: Callable[[Any], Awaitable[Any]], timeout_s: float | None = None) -> Any:
        """Raises what the client raises, ConnectionError where the server has gone or takes longer."""
        from mcp import MCPError

        try:
            async with asyncio.timeout(timeout_s):
                return await request(self._client)
        except TimeoutError:
            raise await self._lost(f"does not answer within {timeout_s:g} s") from None
        except MCPError as error:
            if error.code != CONNECTION_CLOSED:
                raise
            raise await self._lost("has ended") from None

    async def close(self) -> None:
        self._is_over.set()
        await asyncio.wait({self._task})

    async def _live(self) -> None:
        try:
            async with _client(self._config, self._words) as self._client:
                self._ready.set_result(None)
                await self._is_over.wait()
        except BaseException as error:  # of a task group, several at once
            first: BaseException = error
            while isinstance(first, BaseExceptionGroup):
                first = first.exceptions[0]
            if not self._ready.done():
                self._ready.set_exception(first) if isinstance(first, Exception) else self._ready.cancel()
            if isinstance(error, asyncio.CancelledError):
                raise
        finally:
            self._words.close()

    async def _lost(self, what: str) -> ConnectionError:
        self._is_over.set()
        if not self._ready.done():
            self._task.cancel()
        await asyncio.wait({self._task}, timeout=STOP_S)
        await asyncio.to_thread(self._words.thread.join, LAST_WORDS_S)
        server = self._config.url or " ".join(self._config.command)
        said = f". It last said: {self._words.last}" if self._words.last else ""
        return ConnectionError(f"the MCP server {server!r:.200} {what}{said}")


class LastWords:
    """Standard error of a server: it goes on to this process's own, and the last line is kept for messages."""

    def __init__(self) -> None:
        self.last = ""
        read, write = os.pipe()
        self.file = os.fdopen(write, "w", encoding="utf-8")
        self.thread = threading.Thread(target=self._follow, args=(read,), daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.file.close()

    def _follow(self, read: int) -> None:
        with os.fdopen(read, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                sys.stderr.write(line)
                self.last = line.strip()[:300] or self.last


def _client(config: Any, words: LastWords) -> Any:
    try:
        from mcp import Client, StdioServerParameters
        from mcp.client.stdio import stdio_client
    except ImportError as error:
        raise UserError(
            f"environment.name is mcp, but the package mcp 2 is not there ({error}): pip install 'asyncrl[mcp]'"
        ) from error
    if config.url:
        return Client(config.url)
    command, *arguments = config.command
    parameters = StdioServerParameters(command=command, args=arguments, env=config.env)
    return Client(stdio_client(parameters, errlog=words.file))


def _check(arguments: dict[str, Any], tool: Tool) -> None:
    """Raise RefusedError for arguments that are not of the tool's schema."""
    from jsonschema import ValidationError, validate  # mcp brings it

    try:
        validate(arguments, tool.parameters)
    except ValidationError as error:
        where = f"parameter {'.'.join(map(str, error.absolute_path))!r}: " if error.absolute_path else ""
        raise RefusedError(f"{tool.name}: {where}{error.message:.300}") from None


def _parts(block: Any) -> list[str | bytes]:
    """A block of a result as parts of a message."""
    match block.type:
        case "text":
            return [block.text]
        case "image":
            return [base64.b64decode(block.data)]
        case "resource" if hasattr(block.resource, "text"):
            return [block.resource.text]
        case "resource_link":
            return [f"{block.name}: {block.uri}"]
    return [f"[{block.type} that cannot be shown]"]
