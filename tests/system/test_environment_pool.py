"""Environments in processes: every failure is the status of the episode that it belongs to, never a reward."""

from __future__ import annotations

import asyncio
import io
import re
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from PIL import Image

from asyncrl.config import yaml_text
from asyncrl.config.environment import EnvironmentConfig
from asyncrl.environments.episodes import EnvironmentFailed, EnvironmentWorkers, Episode
from asyncrl.environments.image_rule import ImageRule
from asyncrl.environments.interface import Start
from asyncrl.errors import BadStateError, UserError
from tests.rigs.tiny import ROOT

FAULTS = f"{ROOT / 'tests' / 'rigs' / 'environment_faults.py'}:Faults"
ASYNC_FAULTS = FAULTS.replace(":Faults", ":AsyncFaults")
START = Start({"name": "row"}, seed=3)


def run_pool(scenario: Callable[[EnvironmentWorkers], Awaitable[Any]], name: str = FAULTS, *overrides: str) -> Any:
    """Run the scenario, and make sure that the closed pool leaves no process behind."""

    async def run() -> Any:
        before = set(psutil.Process().children(recursive=True))
        section: dict[str, Any] = {"name": name, "workers": 1, "timeouts": {"step_s": 1.5}}
        for word in overrides:
            key, _, value = word.partition("=")
            section = yaml_text.put(section, tuple(key.split(".")), yaml_text.parse(value, word)[0])
        pool = EnvironmentWorkers(EnvironmentConfig.model_validate(section))
        await pool.start()
        try:
            return await asyncio.wait_for(scenario(pool), 90)
        finally:
            family = set(psutil.Process().children(recursive=True)) - before
            await pool.close()
            assert not [process for process in family if process.is_running()]

    return asyncio.run(run())


async def failure_of(episode: Episode, text: str) -> EnvironmentFailed:
    with pytest.raises(EnvironmentFailed) as failed:
        await episode.step(text)
    await episode.close()
    return failed.value


def test_each_failure_ends_its_own_episode_and_the_pool_goes_on() -> None:
    async def scenario(pool: EnvironmentWorkers) -> None:
        async def failed(text: str) -> tuple[str, str]:
            failure = await failure_of(await pool.begin(START), text)
            return failure.kind, str(failure)

        first = await pool.begin(START)
        assert first.opening is not None
        assert first.opening.messages[0].role == "user"
        assert first.opening.messages[0].parts == ("seed 3, row",)
        mistake = await first.step("mistake")
        assert mistake.observation is not None
        assert mistake.observation.messages[0].parts == ("Error: no such place",)
        result = await first.step("look")
        assert (result.reward, result.done, result.info) == (0.25, False, {"steps": 2})
        over = await first.step("over")
        assert (over.reward, over.done, over.observation, over.info) == (0.5, True, None, {"won": True})
        await first.close()

        kind, message = await failed("raise")
        assert kind == "environment_exception"
        assert "KeyError: 'missing' (environment_faults.py:" in message
        for text, told in [
            ("nothing", "step returned NoneType, expected a StepResult"),
            ("nan", "expected a finite number"),
            ("no json", "step returned an info that cannot be recorded"),
            ("memory", "environment.memory_limit_mib"),
        ]:
            kind, message = await failed(text)
            assert kind == "environment_exception"
            assert told in message
        assert pool.restarts == 0
        kind, message = await failed("die")
        assert kind == "environment_died"
        assert "it exited with code 7" in message
        kind, message = await failed("hang")
        assert kind == "environment_timeout"
        assert "step was not done after 1.5 s (environment.timeouts.step_s)" in message
        forked = await pool.begin(START)
        assert (await forked.step("fork")).info == {"steps": 1}, "the copy says nothing"
        await forked.close()
        assert pool.restarts == 2
        assert pool.live == 0
        assert pool.errors == {"environment_exception": 5, "environment_died": 1, "environment_timeout": 1}

    run_pool(scenario)


SCREEN = r"""
import struct, zlib
from asyncrl.environments.interface import observe
from asyncrl.environments.observation import StepResult

def chunk(name, data):
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

class Screen:
    def reset(self, start):
        return None

    def step(self, action):
        side = int(action.text)
        head = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0))
        png = b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(b"\0" * (side + 1))) + chunk(b"IEND", b"")
        return StepResult(observe("the screen: ", png), 0.5)
"""


def test_a_class_whose_image_cannot_be_shown_goes_on_with_a_text_and_its_info_says_so(tmp_path: Path) -> None:
    """A side of 20,000 is refused before it is decoded, and of a pixel two units are made."""
    (tmp_path / "screen.py").write_text(SCREEN)
    section = {"name": f"{tmp_path}/screen.py:Screen", "workers": 1}

    async def play() -> None:
        pool = EnvironmentWorkers(EnvironmentConfig.model_validate(section), ImageRule(unit=14))
        await pool.start()
        try:
            episode = await pool.begin(START)
            wide, dot = [await episode.step(str(side)) for side in (20_000, 1)]
            assert wide.observation is not None
            first, told = wide.observation.messages[0].parts
            assert first == "the screen: "
            assert isinstance(told, str)
            assert re.match(r"Error: no image can be shown: .* 400000000 pixels, over the limit of 89478485", told)
            assert dot.observation is not None
            assert Image.open(io.BytesIO(dot.observation.images[0])).size == (28, 28)
            assert (wide.reward, dot.reward) == (0.5, 0.5)
            assert (wide.info["unshown_image"], dot.info) == (told.removeprefix("Error: "), {})
            assert not pool.errors
        finally:
            await pool.close()

    asyncio.run(play())


def test_who_shares_a_process_with_a_hanging_episode_is_told_apart_from_it() -> None:
    async def scenario(pool: EnvironmentWorkers) -> None:
        guilty, waits, suspended = [await pool.begin(START) for _ in range(3)]
        failures = await asyncio.gather(failure_of(guilty, "hang"), failure_of(waits, "look"))
        assert [failure.kind for failure in failures] == ["environment_timeout", "environment_neighbour_killed"]
        assert (await failure_of(suspended, "look")).kind == "environment_neighbour_killed"
        again = [await pool.begin(START) for _ in range(3)]
        steps = [episode.step("sleep 0.8") for episode in again]
        results = await asyncio.gather(*steps)  # 2.4 s one behind the other, each within its own 1.5 s
        assert [result.info["steps"] for result in results] == [1, 1, 1]
        await asyncio.gather(*(episode.close() for episode in again))

    run_pool(scenario, FAULTS, "instances_per_worker=3")


def test_an_async_episode_that_hangs_ends_alone_and_others_wait_side_by_side() -> None:
    async def scenario(pool: EnvironmentWorkers) -> None:
        episodes = [await pool.begin(START) for _ in range(4)]
        began = time.monotonic()
        naps = [episode.step("nap 1") for episode in episodes[1:]]
        failure, *results = await asyncio.gather(failure_of(episodes[0], "wait"), *naps)
        assert failure.kind == "environment_timeout"
        assert [result.info["steps"] for result in results] == [1, 1, 1]
        assert time.monotonic() - began < 4, "not one behind the other"
        assert pool.restarts == 0, "it was cancelled, its process lives"
        blocking, other = episodes[1:3]
        failures = await asyncio.gather(failure_of(other, "wait"), failure_of(blocking, "sleep 60"))
        assert [failure.kind for failure in failures] == ["environment_neighbour_killed", "environment_timeout"]
        await asyncio.gather(*(episode.close() for episode in episodes))

    run_pool(scenario, ASYNC_FAULTS, "instances_per_worker=4")


def test_a_failed_episode_is_closed_while_its_environment_still_closes_itself() -> None:
    async def scenario(pool: EnvironmentWorkers) -> None:
        failing, other = await pool.begin(START), await pool.begin(START)
        assert (await failure_of(failing, "raise")).kind == "environment_exception"
        assert (await other.step("look")).info == {"steps": 1}
        await other.close()
        assert pool.restarts == 0
        assert pool.errors == {"environment_exception": 1}

    run_pool(scenario, FAULTS.replace(":Faults", ":SlowToClose"), "instances_per_worker=2")


def test_a_failed_reset_is_tried_again_and_a_start_that_fails_three_times_stops_the_run(tmp_path: Path) -> None:
    once = tmp_path / "once"
    once.touch()
    file = tmp_path / "mine.py"
    file.write_text((ROOT / "tests" / "rigs" / "environment_faults.py").read_text() + BREAKS.format(flag=str(once)))

    async def scenario(pool: EnvironmentWorkers) -> None:
        episode = await pool.begin(START)
        assert pool.errors == {"environment_timeout": 1}
        (tmp_path / "broken").touch()
        assert (await failure_of(episode, "die")).kind == "environment_died"
        with pytest.raises(BadStateError, match="3 times one after the other") as stopped:
            await pool.begin(START)
        assert "RuntimeError: no service" in str(stopped.value)
        assert "Traceback (most recent call last)" in str(stopped.value)

    run_pool(scenario, f"{file}:Faults", f"config.hang_in_reset={once}", "timeouts.step_s=1.5")


def test_a_process_comes_back_with_what_its_environment_imported_or_not_at_all(tmp_path: Path) -> None:
    (tmp_path / "needed.py").write_text("worth = 1.0")
    file = tmp_path / "mine.py"
    file.write_text((ROOT / "tests" / "rigs" / "environment_faults.py").read_text() + "\nimport needed\n")

    async def scenario(pool: EnvironmentWorkers) -> None:
        file.write_text("syntax error here")
        assert (await failure_of(await pool.begin(START), "die")).kind == "environment_died"
        episode = await pool.begin(START)
        (tmp_path / "needed.py").write_text("worth = 2.0")
        assert (await failure_of(episode, "die")).kind == "environment_died"
        with pytest.raises(BadStateError, match=r"/needed\.py changed since the run began"):
            await pool.begin(START)

    run_pool(scenario, f"{file}:Faults")


BREAKS = """

if os.path.exists({flag!r}.replace("once", "broken")):
    raise RuntimeError("no service")
"""


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"name": FAULTS, "config": {"hang": "x"}}, "unknown key environment.config.hang"),
        ({"name": FAULTS.replace("Faults", "Fault")}, "has no 'Fault'. Did you mean 'Faults'?"),
        ({"name": FAULTS.replace(":Faults", ":observe")}, "which is no class. An environment is a class with reset"),
        ({"name": "missing.py:Maze"}, "there is no file"),
        ({}, "there is no environment"),
    ],
)
def test_mistakes_in_the_section_are_said_at_the_start(values: dict[str, Any], problem: str) -> None:
    async def start() -> None:
        pool = EnvironmentWorkers(EnvironmentConfig.model_validate(values | {"workers": 1}))
        await pool.start()

    with pytest.raises(UserError) as refused:
        asyncio.run(start())
    assert problem in str(refused.value)
