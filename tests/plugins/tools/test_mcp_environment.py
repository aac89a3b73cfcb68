"""The tools of a real MCP server."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.checks.inputs import check_inputs
from asyncrl.config.environment import EnvironmentConfig
from asyncrl.config.schema import RunConfig
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
    with pytest.raises(UserError, match=r"the MCP server .no-such-program. does not start .FileNotFoundError"):
        run_pool({"name": "mcp", "config": {"command": ["no-such-program"]}}, nothing)
    with pytest.raises(UserError, match="give either a command or a url"):
        run_pool({"name": "mcp"}, nothing)


def test_a_server_only_answers_so_that_a_reward_function_is_needed() -> None:
    assert not EnvironmentConfig.model_validate({"name": "mcp", "config": {"command": ["x"]}}).may_reward


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import no_such_module", "No module named 'no_such_module'"),
        ("import sys; sys.exit('no key: set SEARCH_KEY')", "no key: set SEARCH_KEY"),
    ],
)
def test_a_server_that_dies_is_named_with_its_last_words_before_services_start(
    make_config: Callable[..., RunConfig], code: str, said: str
) -> None:
    pytest.importorskip("mcp", reason="the package mcp is not installed")
    config = make_config(
        environment={
            "name": "mcp",
            "config": {"command": [sys.executable, "-c", code]},
            "limits": {"tokens_per_turn": 4},
        },
        alignment={"rows": 0},
    )
    began = time.monotonic()
    with pytest.raises(
        UserError, match=rf"the MCP server .* does not start .* It last said: .*{said}.* Start it by itself"
    ):
        check_inputs(config, "learner", "rollout_server")
    assert time.monotonic() - began < 20


@pytest.mark.slow
def test_a_server_that_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mcp", reason="the package mcp is not installed")
    from asyncrl_plugins.tools import mcp

    monkeypatch.setattr(mcp, "START_S", 0.5)
    config = mcp.McpEnvironment.Config(command=[sys.executable, "-c", "import time; time.sleep(60)"])
    with pytest.raises(UserError, match=r"does not answer within 0.5 s"):
        asyncio.run(mcp.McpEnvironment.list_tools(config))


@pytest.mark.slow
def test_trajectories_may_share_a_session_which_begins_again_where_it_was_lost() -> None:
    pytest.importorskip("mcp", reason="the package mcp is not installed")

    async def scenario(pool: EnvironmentWorkers) -> None:
        one, other = await asyncio.gather(pool.begin(Start()), pool.begin(Start()))
        assert [seen(await called(each, "count")) for each in (one, other, one)] == [["1"], ["2"], ["3"]]
        await one.close()
        assert seen(await called(other, "count")) == ["4"], "others go on"
        with pytest.raises(EnvironmentFailed, match=r"the MCP server .* has ended. It last said: out of memory"):
            await called(other, "die")
        await other.close()
        again = await pool.begin(Start())
        assert seen(await called(again, "count")) == ["1"]
        await again.close()

    run_pool(mcp_section(shared=True), scenario)
