"""`name: mcp`: the tools of an MCP server, by its command (started inside the worker, with its limits) or its address.

    environment:
      name: mcp
      config: {command: [python, my_server.py]}

Each trajectory has a session of its own. The tools are listed when a worker starts; a lost one whose successor lists
others stops the run. Needs `pip install asyncrl[mcp]`.
"""

from __future__ import annotations

import base64
import json
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


class McpEnvironment(ToolEnvironment):
    """Calls of the policy are calls of the server's tools; what the server says is an error is text for the policy."""

    class Config(ToolSettings):
        command: list[str] = Field(default_factory=list)
        """Program and arguments of a server that speaks over stdin and stdout."""
        url: str = ""
        """Address of a server that speaks streamable HTTP."""
        env: dict[str, str] = Field(default_factory=dict)
        """Environment variables of the command, beside PATH, HOME and the like."""
        tools: list[str] = Field(default_factory=list)
        """Names of the tools that the policy may call; empty: all of them."""

        @model_validator(mode="after")
        def _check(self) -> McpEnvironment.Config:
            if bool(self.command) == bool(self.url):
                raise ValueError("give either a command or a url")
            return self

    listed: ClassVar[list[Tool]] = []

    @classmethod
    async def list_tools(cls, config: Any) -> list[Tool]:
        try:
            async with _client(config) as client:
                found, cursor = [], None
                while True:
                    page = await client.list_tools(cursor=cursor)
                    found += page.tools
                    cursor = page.next_cursor
                    if cursor is None:
                        break
        except UserError:
            raise
        except BaseException as error:  # of a task group, several at once
            first: BaseException = error
            while isinstance(first, BaseExceptionGroup):
                first = first.exceptions[0]
            server = config.url or " ".join(config.command)
            raise UserError(f"the MCP server {server!r} does not list its tools: {one_line(first)}") from error
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
        self._client = _client(start.config)
        await self._client.__aenter__()
        return None

    async def close(self) -> None:
        if hasattr(self, "_client"):
            await self._client.__aexit__(None, None, None)

    async def call(self, tool: Tool, arguments: dict[str, Any]) -> Any:
        from mcp import MCPError

        _check(arguments, tool)
        try:
            result = await self._client.call_tool(tool.name, arguments)
        except MCPError as error:
            if error.code == INVALID_PARAMS:
                raise ToolError(f"{tool.name}: {error.message}") from None
            raise
        parts = [part for block in result.content for part in _parts(block)]
        if result.is_error:
            raise ToolError("\n".join(part for part in parts if isinstance(part, str)) or f"{tool.name} failed")
        return parts or json.dumps(result.structured_content)


def _client(config: Any) -> Any:
    try:
        from mcp import Client, StdioServerParameters
    except ImportError as error:
        raise UserError(
            f"environment.name is mcp, but the package mcp 2 is not there ({error}): pip install 'asyncrl[mcp]'"
        ) from error
    if config.url:
        return Client(config.url)
    command, *arguments = config.command
    return Client(StdioServerParameters(command=command, args=arguments, env=config.env))


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
