"""Videos through the real vLLM on a CPU, and an output layer that shares its weight with the embedding.

vLLM keeps a packed copy of a tied weight, which an update must reach. The engine is the session's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from asyncrl.config.schema import RunConfig
from asyncrl.processing.processor import PromptProcessor
from asyncrl_plugins.vllm.conversion import _media, check_alignment
from asyncrl_plugins.vllm.start import engine_arguments
from learner.groups.ticket import PreparedTicket
from learner.loop.logprob_parity import compare
from rollout_server.engines.base import GenerationRequest
from rollout_server.engines.hf.engine import HFEngine
from rollout_server.production.group_producer import GroupProducer
from tests.plugins.vllm.vllm_rig import MAX_PIXELS, NEEDS_VLLM
from tests.rigs.alignment_rig import answer, answers, learner_engine, parity_tickets, verify
from tests.rigs.engine_rig import FP32, Rig, gap_to
from tests.rigs.policies import moved
from tests.rigs.tiny_families import Family, make_family
from tests.system.test_video import video_config

pytestmark = NEEDS_VLLM


@pytest.fixture
def hf(make_config: Callable[..., RunConfig], tied_model: Path, tmp_path: Path) -> RunConfig:
    """Images are reduced to two tokens by two; videos, whose frames are as large, are not."""
    config = video_config(make_config, tied_model, tmp_path, video_fps=0.7)
    return config.model_copy(update={"model": config.model.model_copy(update={"max_pixels": MAX_PIXELS})})


def greedy(item: PreparedTicket) -> PreparedTicket:
    """The same prompt, for one completion of 30 tokens."""
    sampling = item.ticket.sampling.model_copy(update={"temperature": 0.0, "max_new_tokens": 30, "stop_token_ids": ()})
    return dataclasses.replace(item, ticket=item.ticket.model_copy(update={"group_size": 1, "sampling": sampling}))


def test_videos_get_the_tokens_of_the_hf_engine_and_the_log_probs_of_the_learner(hf: RunConfig, rig: Rig) -> None:
    """Several videos and an image in one prompt, an odd number of frames, another rate, in one batch."""
    assert rig.config.model == hf.model
    items = parity_tickets(hf, rig.processor)
    assert [len(item.ticket.prompt.videos) for item in items] == [2, 1, 0, 0]
    sampled = rig.run(answers(rig.engine, rig.processor, items))
    ours = rig.run(answers(rig.engine, rig.processor, [greedy(item) for item in items]))
    theirs = answer(HFEngine(hf, rig.processor), rig.processor, [greedy(item) for item in items])
    for done, expected in ((one.group, other.group) for one, other in zip(ours, theirs, strict=True)):
        assert len(done.token_ids) == 30
        assert done.token_ids.tolist() == expected.token_ids.tolist()
        assert np.abs(done.logprobs - expected.logprobs).max() < FP32
    for one in sampled:
        verify(one, rig.version)
    assert [one.group.image_grids.tolist() for one in sampled] == [[[1, 4, 4]], [], [[1, 4, 4]], []]
    assert sampled[1].group.video_grids is not None
    assert sampled[1].group.video_grids.tolist() == [[2, 6, 8]]
    parity = compare(learner_engine(hf), rig.processor, sampled, hf.batch.microbatch_tokens)
    assert parity.largest < FP32, parity


def test_an_update_of_tied_weights_reaches_the_output_layer(rig: Rig) -> None:
    weights = rig.initial
    assert not [name for name in weights if "lm_head" in name]
    for seed in (3, 4):
        weights = moved(weights, seed)
        rig.run(rig.update(weights))
        request = rig.request("answer 1 2 3", tokens=20)
        assert gap_to(rig, weights, request, rig.sample(request)[request.request_id, 0]) < FP32


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl"])
def test_vllms_processor_of_the_other_families_heeds_the_limits_of_images(
    family: Family, make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """No engine: its processor alone, started with the engine's arguments."""
    from transformers import AutoConfig
    from vllm.config import ModelConfig  # pyright: ignore[reportMissingImports]
    from vllm.multimodal import MULTIMODAL_REGISTRY  # pyright: ignore[reportMissingImports]
    from vllm.multimodal.processing.context import TimingContext  # pyright: ignore[reportMissingImports]
    from vllm.multimodal.processing.inputs import ProcessorInputs  # pyright: ignore[reportMissingImports]

    base = video_config(make_config, make_family(family, tmp_path / "model"), tmp_path)
    config = base.model_copy(update={"model": base.model.model_copy(update={"max_pixels": MAX_PIXELS})})
    text_config = AutoConfig.from_pretrained(config.model.path).get_text_config()
    arguments = engine_arguments(config, cuda=False, text_config=text_config, banned=[])
    names = ("model", "dtype", "max_model_len", "mm_processor_cache_gb", "mm_processor_kwargs")
    theirs = MULTIMODAL_REGISTRY.create_processor(ModelConfig(**{name: arguments[name] for name in names}))
    processor = PromptProcessor(config.model)
    producer = GroupProducer(cast(Any, SimpleNamespace(takes_pixels=False)), cast(Any, None), processor, "server")
    for item in parity_tickets(config, processor)[:3]:
        blobs = {digest: memoryview(data) for digest, data in item.blobs.items()}
        request = producer._request(item.ticket, blobs)
        assert isinstance(request, GenerationRequest)
        encoded, media = request.prompt, _media(request.prompt)
        assert encoded.unexpanded_ids is not None
        items = theirs.info.parse_mm_data(media["multi_modal_data"])
        inputs = ProcessorInputs(
            encoded.unexpanded_ids.tolist(),
            items,
            media["multi_modal_uuids"],
            hf_processor_mm_kwargs=media["mm_processor_kwargs"],
        )
        check_alignment(encoded, theirs.apply(inputs, TimingContext()))
        assert (encoded.image_grids == [1, 4, 4]).all()
