"""Images on their way to vLLM's core: sent once, sent again where the core has dropped them, computed again after a
preemption, and never another prompt's."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from asyncrl_plugins.vllm.sent_media import submissions
from rollout_server.engines.base import Completion, GenerationRequest
from tests.plugins.vllm.vllm_rig import NEEDS_VLLM
from tests.rigs.engine_rig import FP32, QUESTION, Rig, gap_to
from tests.rigs.policies import gaps, moved, picture

pytestmark = NEEDS_VLLM
SIZE = 4
"""Completions of a group."""


def recorded_bytes(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each request to vLLM's core from here on."""
    from vllm.v1.engine import EngineCoreRequestType  # pyright: ignore[reportMissingImports]

    core, sizes = rig.engine._llm.engine_core, []
    send: Callable[..., Any] = core._send_input_message

    def recording(message: tuple[Any, ...], engine: bytes) -> Any:
        if message[0] == EngineCoreRequestType.ADD.value:
            sizes.append(sum(memoryview(part).nbytes for part in message))
        return send(message, engine)

    monkeypatch.setattr(core, "_send_input_message", recording)
    return sizes


def pixel_bytes(request: GenerationRequest) -> int:
    assert request.prompt.pixel_values is not None
    return request.prompt.pixel_values.nbytes


def largest_gap(rig: Rig, request: GenerationRequest, done: dict[tuple[int, int], Completion]) -> float:
    return max(gap_to(rig, rig.initial, request, done[request.request_id, index]) for index in range(SIZE))


def test_the_images_of_a_group_are_sent_once_and_those_of_another_prompt_are_its_own(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [rig.request(QUESTION, picture(n), picture(n + 1), size=SIZE, temperature=0.8) for n in (40, 50)]
    pixels = pixel_bytes(requests[0])
    sizes = recorded_bytes(rig, monkeypatch)
    for request in requests:
        sizes.clear()
        assert largest_gap(rig, request, rig.sample(request)) < FP32
        first, *others = sizes
        assert len(others) == SIZE - 1
        assert pixels < first < 1.2 * pixels
        assert max(others) < 0.1 * pixels
    both = rig.request(QUESTION, picture(41), picture(50), size=SIZE, temperature=0.8)  # one of each prompt
    sizes.clear()
    assert largest_gap(rig, both, rig.sample(both)) < FP32
    assert max(sizes) < 0.1 * pixels, "the core keeps them for later turns and groups"


def test_images_that_the_core_has_dropped_are_sent_again(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    request = rig.request(QUESTION, picture(60), size=SIZE, temperature=0.8)
    once = rig.sample(request)
    rig.run(rig.engine._llm.engine_core.reset_mm_cache_async())  # on its side alone
    sizes = recorded_bytes(rig, monkeypatch)
    again = rig.sample(request)
    assert len(sizes) >= SIZE + 1
    assert max(sizes) > pixel_bytes(request)
    assert largest_gap(rig, request, again) < FP32
    for place, done in again.items():
        assert done.token_ids.tolist() == once[place].token_ids.tolist(), "nothing was sampled twice"


def test_an_update_computes_prompts_again_whose_images_lay_in_a_cached_prefix(rig: Rig) -> None:
    long = "read 0 1 2 3 4 5 6 7 8 9 " * 12
    before = rig.request(long, picture(1), tokens=2)
    assert len(before.prompt.token_ids) > 128  # a block of the prefix cache, with the image in it
    rig.sample(before)
    request = rig.request(long, picture(1), tokens=100, temperature=0.8)
    old, new = rig.version, moved(rig.initial, 1)
    done = rig.run(rig.update_after(new, 40, [request]))[request.request_id, 0]
    assert set(done.versions.tolist()) == {old, old + 1}
    assert gaps(rig.config, {old: rig.initial, old + 1: new}, request, done).max() < FP32


def caches(capacity: int) -> tuple[Any, Any]:
    """vLLM's mirror and what its core keeps, of `capacity` bytes each."""
    from vllm.multimodal.cache import (  # pyright: ignore[reportMissingImports]
        LruKeyReplicatedReceiverCache,
        LruKeyReplicatedSenderCache,
    )

    multimodal = SimpleNamespace(mm_processor_cache_gb=capacity / 2**30)
    config: Any = SimpleNamespace(get_multimodal_config=lambda: multimodal)
    return LruKeyReplicatedSenderCache(config), LruKeyReplicatedReceiverCache(config)


def test_the_core_never_takes_another_item_however_much_it_drops() -> None:
    """Prompts of up to three images share a cache of four, some requests are lost on the way, and the core forgets."""
    from vllm.multimodal.cache import MultiModalCacheMissError  # pyright: ignore[reportMissingImports]
    from vllm.multimodal.inputs import (  # pyright: ignore[reportMissingImports]
        MultiModalBatchedField,
        MultiModalFeatureSpec,
        MultiModalFieldElem,
        MultiModalKwargsItem,
        PlaceholderRange,
    )

    def item(number: int) -> Any:
        pixels = MultiModalFieldElem(data=torch.full((100,), float(number)), field=MultiModalBatchedField())
        return MultiModalKwargsItem({"pixel_values": pixels})

    mirror, core = caches(4 * 400)
    llm = SimpleNamespace(renderer=SimpleNamespace(mm_processor_cache=mirror))
    chance = random.Random(0)
    left_out = missed = 0
    for _ in range(2000):
        numbers = [chance.randrange(8) for _ in range(chance.randint(1, 3))]
        names = [f"digest {number}" for number in numbers]
        whole = {"mm_kwargs": {"image": [item(number) for number in numbers]}, "mm_hashes": {"image": names}}
        for given in submissions(llm, whole):
            sent = given["mm_kwargs"]["image"]
            left_out += sent.count(None)
            if chance.random() < 0.05:
                break  # cancelled before it is sent
            if chance.random() < 0.05:
                core.clear_cache()
            features = [
                MultiModalFeatureSpec(one, "image", name, PlaceholderRange(offset=0, length=1), name)
                for one, name in zip(sent, names, strict=True)
            ]
            try:
                core.get_and_update_features(features)
            except MultiModalCacheMissError as error:
                missed += 1
                for name in error.mm_hashes:
                    mirror.invalidate(name)
                continue
            items: list[Any] = [feature.data for feature in features]
            assert [int(taken["pixel_values"].data[0]) for taken in items] == numbers
            break
        else:
            pytest.fail("the items that the core had dropped were not sent again")
    assert left_out > 500
    assert missed > 50
