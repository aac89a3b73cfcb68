"""Classes for TRL's `environment_factory`, and TRL's own reading of them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from asyncrl.environments.episodes import EnvironmentFailed, EnvironmentWorkers
from asyncrl.environments.interface import Start
from tests.rigs.environment_pools import called, run_pool, seen

ROOMS = f"{Path(__file__).with_name('rooms.py')}:Rooms"


def test_a_class_for_trl_is_played_and_earns_what_get_reward_says() -> None:
    async def scenario(pool: EnvironmentWorkers) -> None:
        assert pool.tools is not None
        assert [tool["function"]["name"] for tool in pool.tools.schemas] == ["look", "open_door"]
        one, other = await pool.begin(Start({"key": 4})), await pool.begin(Start({"key": 4}))
        assert one.opening is not None
        assert one.opening == other.opening
        assert one.opening.messages[0].parts[0] == "Find the key."
        assert seen(await called(one, "look")) == [(70, 56), "doors"]
        assert seen(await called(one, "open_door", number=12)) == ["Error: there is no door 12"]
        opened = [await called(one, "open_door", number=number) for number in (3, 4)]
        assert [(seen(result), result.reward) for result in opened] == [(["nothing"], 0.5), (["a key"], 0.5)]
        ended = await one.step("I have it.")
        assert (ended.reward, ended.done) == (0.0, True), "the sum is what get_reward says at the end"
        with pytest.raises(EnvironmentFailed, match="OSError: the house is gone") as failed:
            await called(other, "open_door", number=-1)
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

    from tests.plugins.tools.rooms import Rooms

    async def scenario(pool: EnvironmentWorkers) -> None:
        settings = GRPOConfig(str(tmp_path), use_cpu=True, report_to=[], max_steps=1, save_strategy="no")
        processor = AutoProcessor.from_pretrained(tiny_model)
        processor.chat_template = qwen3_vl_chat_template  # it asks for one that lists tools
        trainer = GRPOTrainer(str(tiny_model), environment_factory=Rooms, args=settings, processing_class=processor)
        theirs = [get_json_schema(each)["function"] for each in trainer.tools]
        assert pool.tools is not None
        for ours, its in zip((tool["function"] for tool in pool.tools.schemas), theirs, strict=True):
            assert (ours["name"], ours["description"]) == (its["name"], its["description"])
            for name, what in its["parameters"]["properties"].items():
                assert {key: ours["parameters"]["properties"][name][key] for key in what} == what
        assert trainer.reward_func_names == ["Rooms"]

    run_pool({"name": "trl", "config": {"factory": ROOMS}}, scenario)
