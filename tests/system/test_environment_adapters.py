"""Environments of other packages, with the real ones: an MCP server and gymnasium's FrozenLake."""

from __future__ import annotations

import asyncio
import io
import json
import sys
from typing import Any

import pytest
from PIL import Image

from asyncrl.environments.interface import Start
from asyncrl.environments.observation import StepResult
from asyncrl.environments.pool import EnvironmentPool, Episode
from asyncrl.environments.settings import override
from asyncrl.environments.worker_host import EnvironmentFailed
from asyncrl.errors import UserError
from tests.rigs.tiny import ROOT


def run_pool(section: dict[str, Any], scenario: Any) -> Any:
    async def run() -> Any:
        pool = EnvironmentPool(override({"workers": 1, **section}, []))
        try:
            await pool.start()
            return await asyncio.wait_for(scenario(pool), 120)
        finally:
            await pool.close()

    return asyncio.run(run())


def seen(result: StepResult) -> list[Any]:
    assert result.observation is not None
    parts = [part for message in result.observation.messages for part in message.parts]
    return [Image.open(io.BytesIO(part)).size if isinstance(part, bytes) else part for part in parts]


def mcp_section(*more: str, **config: Any) -> dict[str, Any]:
    command = [sys.executable, str(ROOT / "tests" / "rigs" / "mcp_server.py"), *more]
    return {
        "name": "mcp",
        "config": {"command": command, **config},
        "timeouts": {"step_s": 8},
        "instances_per_worker": 2,
    }


@pytest.mark.slow
def test_an_mcp_servers_tools_are_called_in_a_session_for_each_trajectory() -> None:
    pytest.importorskip("mcp", reason="the package mcp is not installed")

    async def scenario(pool: EnvironmentPool) -> None:
        async def call(episode: Episode, name: str, **arguments: Any) -> list[Any]:
            text = f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"
            return seen(await episode.step(pool.action(text)))

        schema = pool.tools[0]["function"]
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

    async def nothing(pool: EnvironmentPool) -> None: ...

    with pytest.raises(UserError, match=r"environment.config.tools has 'ad', but the MCP server's tools are add, pict"):
        run_pool(mcp_section(tools=["ad"]), nothing)
    with pytest.raises(UserError, match="the MCP server 'no-such-program' does not list its tools: FileNotFoundError"):
        run_pool({"name": "mcp", "config": {"command": ["no-such-program"]}}, nothing)
    with pytest.raises(UserError, match="give either a command or a url"):
        run_pool({"name": "mcp"}, nothing)


LAKE = {"id": "FrozenLake-v1", "kwargs": {"is_slippery": False}, "row_kwargs": ["desc"]}
WORDS = ["left", "down", "right", "up"]


def test_gymnasiums_frozen_lake_is_played_by_its_pictures() -> None:
    pytest.importorskip("gymnasium", reason="the package gymnasium is not installed (the extra `gymnasium`)")
    pytest.importorskip("pygame", reason="pygame, which draws the lake, is not installed (the extra `gymnasium`)")
    start = Start({"desc": ["SF", "HG"]}, seed=5)

    async def scenario(pool: EnvironmentPool) -> None:
        assert (pool.tools, pool.call_format) == ([], "none")
        episode, same = await pool.begin(start), await pool.begin(start)
        assert episode.opening is not None
        assert episode.opening == same.opening
        assert len(episode.opening.images) == 1
        assert seen(await episode.step(pool.action("jump"))) == [
            "Error: there is no action 'jump'. Actions: left, down, right, up"
        ]
        moved = await episode.step(pool.action("right"))
        assert moved.observation is not None
        assert moved.observation.images != episode.opening.images
        assert moved.state_key != episode.state_key
        won = await episode.step(pool.action("down"))
        assert (won.reward, won.done, won.info) == (1.0, True, {"terminated": True, "truncated": False, "steps": 2})
        lost = await same.step(pool.action("down"))
        assert (lost.reward, lost.done) == (0.0, True)
        await asyncio.gather(episode.close(), same.close())

    run_pool({"name": "gymnasium", "config": LAKE | {"actions": WORDS}, "instances_per_worker": 2}, scenario)
    with pytest.raises(UserError, match="actions has 3 words, but FrozenLake-v1 has a space of 4 actions"):
        run_pool({"name": "gymnasium", "config": LAKE | {"actions": WORDS[:3]}}, scenario)
