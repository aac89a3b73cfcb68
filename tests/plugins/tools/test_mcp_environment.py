"""The tools of a real MCP server."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.environment import EnvironmentConfig
from asyncrl.environments.episodes import EnvironmentFailed, EnvironmentWorkers, Episode
from asyncrl.environments.interface import Start
from asyncrl.errors import UserError
from tests.rigs.environment_pools import called, run_pool, seen


def mcp_section(*more: str, **config: Any) -> dict[str, Any]:
    command = [sys.executable, str(Path(__file__).with_name("mcp_server.py")), *more]
    return {
        "name": "mcp",
        "config": {"command": command, **config},
        "timeouts": {"step_s": 8},
        "instances_per_worker": 2,
    }


@pytest.mark.slow
def test_an_mcp_servers_tools_are_called_in_a_session_for_each_trajectory() -> None:
    pytest.importorskip("mcp", reason="the package mcp is not installed")

    async def scenario(pool: EnvironmentWorkers) -> None:
        async def call(episode: Episode, name: str, **arguments: Any) -> list[Any]:
            return seen(await called(episode, name, **arguments))

        assert pool.tools is not None

        schema = pool.tools.schemas[0]["function"]
        assert (schema["name"], schema["description"]) == ("add", "Add two numbers.")
        assert schema["parameters"]["required"] == ["a", "b"]
        one, other = await pool.begin(Start()), await pool.begin(Start())
        assert await call(one, "add", a=2, b=3) == ["5"]
        assert await call(one, "add", a="two", b=3) == ["Error: add: parameter 'a': 'two' is not of type 'integer'"]
        assert await call(one, "picture", width=70) == [(70, 60)]
        assert await call(one, "fail") == ["Error: Error executing tool fail"]
        assert [await call(one, "count"), await call(one, "count"), await call(other, "count")] == [["1"], ["2"], ["1"]]
        for name, kind in (("die", "environment_exception"), ("wait", "environment_timeout")):
            with pytest.raises(EnvironmentFailed) as failed:
                await call(one, name)
            assert failed.value.kind == kind
            await one.close()
            one = await pool.begin(Start())
        assert await call(other, "count") == ["2"], "its own session has gone on"
        assert pool.restarts == 0
        await asyncio.gather(one.close(), other.close())

    run_pool(mcp_section(), scenario)


@pytest.mark.slow
def test_an_mcp_server_that_does_not_start_or_lacks_a_tool_is_named() -> None:
    pytest.importorskip("mcp", reason="the package mcp is not installed")

    async def nothing(pool: EnvironmentWorkers) -> None: ...

    with pytest.raises(UserError, match=r"environment.config.tools has 'ad', but the MCP server's tools are add, pict"):
        run_pool(mcp_section(tools=["ad"]), nothing)
    with pytest.raises(UserError, match="the MCP server 'no-such-program' does not list its tools: FileNotFoundError"):
        run_pool({"name": "mcp", "config": {"command": ["no-such-program"]}}, nothing)
    with pytest.raises(UserError, match="give either a command or a url"):
        run_pool({"name": "mcp"}, nothing)


def test_a_server_only_answers_so_that_a_reward_function_is_needed() -> None:
    assert not EnvironmentConfig.model_validate({"name": "mcp", "config": {"command": ["x"]}}).may_reward
