"""Adapters in the vllm engine, with the real vLLM on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.config.schema import RunConfig
from protocol.endpoints import SHARED_MEMORY
from rollout_server.engines.vllm_engine.adapter import slot_arguments
from tests.adapters import made_up_adapter, merged, spec_of
from tests.test_vllm_engine import FP32, QUESTION, gap_to, picture
from tests.test_weight_updates import gaps
from tests.vllm_rig import MISSING, Rig

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(MISSING, reason="vLLM is not installed: WITH_VLLM=1 bash scripts/install.sh"),
]


@pytest.fixture(scope="module")
def rig(tiny_model: Path, digits_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    config = RunConfig.model_validate(
        {
            "run_dir": str(tmp_path_factory.mktemp("vllm") / "run"),
            "model": {"path": str(tiny_model), "lora": {"rank": 4}},
            "data": {
                "train_files": [str(digits_data / "rl.parquet")],
                "max_prompt_length": 128,
                "max_response_length": 128,
            },
            "batch": {"group_size": 4, "tokens_per_microbatch": 512},
            "rollout": {"engine": "vllm", "max_concurrent_sequences": 32, "cpu_threads": 1},
            "reward": {"functions": [{"function": "exact_match"}]},
        }
    )
    made = Rig(config, made_up_adapter(config, 1))
    yield made
    made.close()


def test_an_adapter_is_swapped_under_running_sequences_without_mixing_versions(rig: Rig) -> None:
    whole = rig.config.model_copy(
        update={"model": rig.config.model.model_copy(update={"lora": type(rig.config.model.lora)()})}
    )
    first, second = rig.initial, made_up_adapter(rig.config, 2)
    rig.run(rig.update(first))
    old = rig.version
    policies = {old: merged(rig.config, first), old + 1: merged(rig.config, second)}
    requests = [
        rig.request(QUESTION, picture(1), picture(2), tokens=120, size=2, temperature=0.8),
        rig.request("read", tokens=120, size=2, temperature=0.8),
    ]
    done = rig.run(rig.update_after(second, 100, requests))
    for request in requests:
        for index in range(2):
            completion = done[request.request_id, index]
            assert sorted(set(completion.versions.tolist())) == [old, old + 1]
            assert gaps(whole, policies, request, completion).max() < FP32  # type: ignore[arg-type]
    later = rig.request(QUESTION, picture(1), tokens=20)
    rig.config = whole
    assert gap_to(rig, policies[old + 1], later, rig.sample(later)[later.request_id, 0]) < FP32
    assert not list(SHARED_MEMORY.glob("asyncrl-adapter-*"))


def test_an_adapter_gets_the_smallest_slot_that_it_fits_in(rig: Rig) -> None:
    spec = spec_of(rig.engine._config)
    assert slot_arguments(spec)["max_lora_rank"] == 8
    assert slot_arguments(spec.model_copy(update={"rank": 100}))["max_lora_rank"] == 128
    with pytest.raises(Exception, match="vLLM takes at most 512"):
        slot_arguments(spec.model_copy(update={"rank": 513}))
