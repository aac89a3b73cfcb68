"""A server of the real package."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.environments.episodes import EnvironmentFailed, EnvironmentWorkers
from asyncrl.environments.interface import Start
from asyncrl.errors import UserError
from tests.rigs.environment_pools import called, run_pool, seen
from tests.rigs.ports import own_port


@pytest.fixture(scope="module")
def numbers() -> Iterator[str]:
    """Address of a server of the real package."""
    pytest.importorskip("openenv.core.env_server", reason="openenv-core is not installed")
    port = own_port()
    server = subprocess.Popen([sys.executable, str(Path(__file__).with_name("openenv_server.py")), str(port)])
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
    async def scenario(pool: EnvironmentWorkers) -> None:
        assert pool.tools is not None
        schema = pool.tools.schemas[0]["function"]
        assert (schema["name"], schema["description"]) == ("act", "Guess the number.")
        assert schema["parameters"]["properties"] == {
            "number": {"description": "your guess, 0 to 7", "title": "Number", "type": "integer"}
        }
        one, other = await pool.begin(Start(seed=13)), await pool.begin(Start({"number": 3}))
        assert one.opening is not None
        assert (one.opening.messages[0].role, one.opening.messages[0].parts[0]) == ("user", "Guess my number, 0 to 7.")
        told = await called(one, "act", number=2)
        assert seen(told) == ["higher", (57, 56)]
        assert told.reward == 0.125
        refused = await called(one, "act", number="two")
        assert seen(refused)[0].startswith("Error: act: ")
        assert refused.info["calls"][0]["kind"] == "arguments"  # type: ignore[index]
        assert seen(await called(other, "act", number=5)) == ["lower", (57, 56)]
        won = await called(one, "act", number=5)
        assert (won.reward, won.done) == (1.0, True)
        for number, kind, why in ((-1, "environment_exception", "EXECUTION_ERROR"), (99, "environment_timeout", "3 s")):
            episode = await pool.begin(Start(seed=1))
            with pytest.raises(EnvironmentFailed, match=why) as failed:
                await called(episode, "act", number=number)
            assert failed.value.kind == kind
            await episode.close()
        assert seen(await called(other, "act", number=5)) == ["lower", (58, 56)], "its own session has gone on"
        with pytest.raises(EnvironmentFailed) as failed:
            await called(other, "act", number=98)
        assert failed.value.kind == "environment_exception", "the server died: no reward"
        await asyncio.gather(one.close(), other.close())

    section = {"url": numbers, "images": ["picture"], "text": ["hint"]}
    limits = {"timeouts": {"step_s": 3}, "instances_per_worker": 3}
    run_pool({"name": "openenv", "config": section, **limits}, scenario)


def test_an_openenv_server_that_is_not_there_is_named() -> None:
    async def nothing(pool: EnvironmentWorkers) -> None: ...

    with pytest.raises(UserError, match=r"the OpenEnv server http://127.0.0.1:9 does not say what its actions are"):
        run_pool({"name": "openenv", "config": {"url": "http://127.0.0.1:9"}}, nothing)
