"""Environments of other packages, with the real ones: servers of MCP and OpenEnv, gymnasium's FrozenLake, TRL's
classes."""

from __future__ import annotations

import asyncio
import io
import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from asyncrl.environments.interface import Start
from asyncrl.environments.observation import StepResult
from asyncrl.environments.pool import EnvironmentPool, Episode
from asyncrl.environments.settings import override
from asyncrl.environments.worker_host import EnvironmentFailed
from asyncrl.errors import UserError
from tests.rigs.ports import own_port
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


async def called(pool: EnvironmentPool, episode: Episode, name: str, **arguments: Any) -> StepResult:
    text = f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"
    return await episode.step(pool.action(text))


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
            return seen(await called(pool, episode, name, **arguments))

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


@pytest.fixture(scope="module")
def numbers() -> Iterator[str]:
    """Address of a server of the real package."""
    pytest.importorskip("openenv.core.env_server", reason="openenv-core is not installed")
    port = own_port()
    server = subprocess.Popen([sys.executable, str(ROOT / "tests" / "rigs" / "openenv_server.py"), str(port)])
    try:
        deadline = time.monotonic() + 60
        while not answers(f"http://127.0.0.1:{port}/schema"):
            assert time.monotonic() < deadline, "the server does not start"
            assert server.poll() is None, "the server has ended"
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False


@pytest.mark.slow
def test_an_openenv_server_is_played_in_a_session_for_each_trajectory(numbers: str) -> None:
    async def scenario(pool: EnvironmentPool) -> None:
        schema = pool.tools[0]["function"]
        assert (schema["name"], schema["description"]) == ("act", "Guess the number.")
        assert schema["parameters"]["properties"] == {
            "number": {"description": "your guess, 0 to 7", "title": "Number", "type": "integer"}
        }
        one, other = await pool.begin(Start(seed=13)), await pool.begin(Start({"number": 3}))
        assert one.opening is not None
        assert (one.opening.messages[0].role, one.opening.messages[0].parts[0]) == ("user", "Guess my number, 0 to 7.")
        told = await called(pool, one, "act", number=2)
        assert seen(told) == ["higher", (57, 56)]
        assert told.reward == 0.125
        refused = await called(pool, one, "act", number="two")
        assert seen(refused)[0].startswith("Error: act: ")
        assert refused.info["calls"][0]["kind"] == "arguments"  # type: ignore[index]
        assert seen(await called(pool, other, "act", number=5)) == ["lower", (57, 56)]
        won = await called(pool, one, "act", number=5)
        assert (won.reward, won.done) == (1.0, True)
        for number, kind, why in ((-1, "environment_exception", "EXECUTION_ERROR"), (99, "environment_timeout", "3 s")):
            episode = await pool.begin(Start(seed=1))
            with pytest.raises(EnvironmentFailed, match=why) as failed:
                await called(pool, episode, "act", number=number)
            assert failed.value.kind == kind
            await episode.close()
        assert seen(await called(pool, other, "act", number=5)) == ["lower", (58, 56)], "its own session has gone on"
        with pytest.raises(EnvironmentFailed) as failed:
            await called(pool, other, "act", number=98)
        assert failed.value.kind == "environment_exception", "the server died: no reward"
        await asyncio.gather(one.close(), other.close())

    section = {"url": numbers, "images": ["picture"], "text": ["hint"]}
    limits = {"timeouts": {"step_s": 3}, "instances_per_worker": 3}
    run_pool({"name": "openenv", "config": section, **limits}, scenario)


def test_an_openenv_server_that_is_not_there_is_named() -> None:
    async def nothing(pool: EnvironmentPool) -> None: ...

    with pytest.raises(UserError, match=r"the OpenEnv server http://127.0.0.1:9 does not say what its actions are"):
        run_pool({"name": "openenv", "config": {"url": "http://127.0.0.1:9"}}, nothing)


ROOMS = f"{ROOT / 'tests' / 'rigs' / 'trl_rooms.py'}:Rooms"


def test_a_class_for_trl_is_played_and_earns_what_get_reward_says() -> None:
    async def scenario(pool: EnvironmentPool) -> None:
        assert [tool["function"]["name"] for tool in pool.tools] == ["look", "open_door"]
        one, other = await pool.begin(Start({"key": 4})), await pool.begin(Start({"key": 4}))
        assert one.opening is not None
        assert one.opening == other.opening
        assert one.opening.messages[0].parts[0] == "Find the key."
        assert seen(await called(pool, one, "look")) == [(70, 56), "doors"]
        assert seen(await called(pool, one, "open_door", number=12)) == ["Error: there is no door 12"]
        opened = [await called(pool, one, "open_door", number=number) for number in (3, 4)]
        assert [(seen(result), result.reward) for result in opened] == [(["nothing"], 0.5), (["a key"], 0.5)]
        ended = await one.step(pool.action("I have it."))
        assert (ended.reward, ended.done) == (0.0, True), "the sum is what get_reward says at the end"
        with pytest.raises(EnvironmentFailed, match="OSError: the house is gone") as failed:
            await called(pool, other, "open_door", number=-1)
        assert failed.value.kind == "environment_exception"
        await asyncio.gather(one.close(), other.close())

    run_pool({"name": "trl", "config": {"factory": ROOMS}, "instances_per_worker": 2}, scenario)


@pytest.mark.slow
def test_trl_itself_finds_the_same_tools_in_the_class(tiny_model: Path, tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="trl is not installed (the extra `trl`)")
    from transformers import AutoProcessor
    from transformers.utils import get_json_schema
    from trl import GRPOConfig, GRPOTrainer
    from trl.chat_template_utils import qwen3_vl_chat_template

    from tests.rigs.trl_rooms import Rooms

    async def scenario(pool: EnvironmentPool) -> None:
        settings = GRPOConfig(str(tmp_path), use_cpu=True, report_to=[], max_steps=1, save_strategy="no")
        processor = AutoProcessor.from_pretrained(tiny_model)
        processor.chat_template = qwen3_vl_chat_template  # it asks for one that lists tools
        trainer = GRPOTrainer(str(tiny_model), environment_factory=Rooms, args=settings, processing_class=processor)
        theirs = [get_json_schema(each)["function"] for each in trainer.tools]
        for ours, its in zip((tool["function"] for tool in pool.tools), theirs, strict=True):
            assert (ours["name"], ours["description"]) == (its["name"], its["description"])
            for name, what in its["parameters"]["properties"].items():
                assert {key: ours["parameters"]["properties"][name][key] for key in what} == what
        assert trainer.reward_func_names == ["Rooms"]

    run_pool({"name": "trl", "config": {"factory": ROOMS}}, scenario)
