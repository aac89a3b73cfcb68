"""FrozenLake of the real package."""

from __future__ import annotations

import asyncio

import pytest

from asyncrl.config.environment import EnvironmentConfig
from asyncrl.environments.episodes import EnvironmentWorkers
from asyncrl.environments.interface import Start
from asyncrl.errors import UserError
from tests.rigs.environment_pools import run_pool, seen

LAKE = {"id": "FrozenLake-v1", "kwargs": {"is_slippery": False}, "row_kwargs": ["desc"]}
WORDS = ["left", "down", "right", "up"]


def test_gymnasiums_frozen_lake_is_played_by_its_pictures() -> None:
    pytest.importorskip("gymnasium", reason="the package gymnasium is not installed (the extra `gymnasium`)")
    pytest.importorskip("pygame", reason="pygame, which draws the lake, is not installed (the extra `gymnasium`)")
    start = Start({"desc": ["SF", "HG"]}, seed=5)

    async def scenario(pool: EnvironmentWorkers) -> None:
        assert pool.tools is None
        episode, same = await pool.begin(start), await pool.begin(start)
        assert episode.opening is not None
        assert episode.opening == same.opening
        assert len(episode.opening.images) == 1
        assert seen(await episode.step("jump")) == ["Error: there is no action 'jump'. Actions: left, down, right, up"]
        moved = await episode.step("right")
        assert moved.observation is not None
        assert moved.observation.images != episode.opening.images
        won = await episode.step("down")
        assert (won.reward, won.done, won.info) == (1.0, True, {"terminated": True, "truncated": False, "steps": 2})
        lost = await same.step("down")
        assert (lost.reward, lost.done) == (0.0, True)
        await asyncio.gather(episode.close(), same.close())

    run_pool({"name": "gymnasium", "config": LAKE | {"actions": WORDS}, "instances_per_worker": 2}, scenario)
    with pytest.raises(UserError, match="actions has 3 words, but FrozenLake-v1 has a space of 4 actions"):
        run_pool({"name": "gymnasium", "config": LAKE | {"actions": WORDS[:3]}}, scenario)


def test_the_environment_rewards_its_turns() -> None:
    assert EnvironmentConfig.model_validate({"name": "gymnasium"}).may_reward
