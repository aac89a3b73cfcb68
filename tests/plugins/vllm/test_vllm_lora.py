"""Adapters in the vllm engine, with the real vLLM on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.config.schema import RunConfig
from asyncrl.errors import UserError
from asyncrl_plugins.vllm.weights import check_slot
from protocol.endpoints import SHARED_MEMORY
from tests.plugins.vllm.vllm_rig import NEEDS_VLLM, VLLMRig, vllm_config
from tests.rigs.adapters import made_up_adapter, merged
from tests.rigs.engine_rig import FP32, QUESTION, Rig, gap_to
from tests.rigs.policies import gaps, initial_weights, picture

pytestmark = NEEDS_VLLM


@pytest.fixture(scope="module")
def rig(tiny_model: Path, digits_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """Adapters in the language model and in the vision tower."""
    config = vllm_config(
        tiny_model,
        digits_data,
        tmp_path_factory.mktemp("vllm") / "run",
        max_response_length=128,
        model={"freeze_vision_tower": False, "lora": {"rank": 4, "vision_tower": True}},
    )
    made = VLLMRig(config, made_up_adapter(config, 1))
    yield made
    made.close()


def whole_model(rig: Rig) -> RunConfig:
    """The configuration without an adapter."""
    return rig.config.model_copy(
        update={"model": rig.config.model.model_copy(update={"lora": type(rig.config.model.lora)()})}
    )


def test_a_request_from_before_the_first_adapter_takes_it_up_with_its_version(rig: Rig) -> None:
    """This one comes first: what runs without an adapter may not be stamped with the version of one."""
    config, base = whole_model(rig), initial_weights(whole_model(rig))
    request = rig.request(QUESTION, picture(1), tokens=100, temperature=0.8)
    done = rig.run(rig.update_after(rig.initial, 30, [request]))[request.request_id, 0]
    assert sorted(set(done.versions.tolist())) == [0, 1]
    policies = {0: base, 1: merged(rig.config, rig.initial)}
    assert gaps(config, policies, request, done).max() < FP32


def test_an_adapter_is_swapped_under_running_sequences_without_mixing_versions(rig: Rig) -> None:
    whole = whole_model(rig)
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
            assert gaps(whole, policies, request, completion).max() < FP32
    later = rig.request(QUESTION, picture(1), tokens=20)
    assert gap_to(rig, policies[old + 1], later, rig.sample(later)[later.request_id, 0], whole) < FP32
    assert not list(SHARED_MEMORY.glob("asyncrl-adapter-*"))


def test_layers_for_which_vllm_has_no_place_are_refused(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.run(check_slot(rig.engine._llm))

    async def two_workers(method: str) -> list[list[str]]:
        assert method == "layers_without_slot"
        return [["visual.blocks.0.attn.qkv", "of another worker"], ["visual.blocks.0.attn.qkv"]]

    monkeypatch.setattr(rig.engine._llm, "collective_rpc", two_workers)
    with pytest.raises(UserError, match=r"takes no adapter in 1 of this model's layers, such as visual.blocks.0.*hf$"):
        rig.run(check_slot(rig.engine._llm))
