"""Experts of the engine, recorded, packed and taken by the learner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from asyncrl.attention.shared_prefix import SHARED_PREFIX_ATTENTION, register
from asyncrl.config.schema import RunConfig
from asyncrl.models.output_head import hidden_states, scaled_logits
from asyncrl.models.parts import checkpoint_layers
from asyncrl.processing.encoded_prompt import EncodedPrompt
from asyncrl_plugins.moe.replay import RoutingReplay
from asyncrl_plugins.moe.settings import RoutingReplayConfig
from asyncrl_plugins.moe.shape import ExpertShape
from learner.training.packing import PackedTrajectory, TrainGroup, build_micro_batch
from protocol.messages import Sampling
from rollout_server.engines.base import Completion, GenerationRequest
from rollout_server.engines.hf.decode_batch import DecodeBatch

CPU = torch.device("cpu")
NAME = "routing_replay"
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "mlp_only_layers": [1],
    "norm_topk_prob": True,
    "initializer_range": 0.3,
}


def model_of(family: str = "qwen3_moe", *, attention: str = SHARED_PREFIX_ATTENTION, nudged: bool = False) -> Any:
    """A model whose routers are all but undecided. Nudged, they choose otherwise, and weigh alike."""
    register()
    torch.manual_seed(0)
    if family == "qwen3_moe":
        config: Any = transformers.Qwen3MoeConfig(**SIZES)
        model = transformers.Qwen3MoeForCausalLM._from_config(config, attn_implementation=attention)
    else:
        text = {**SIZES, "rope_parameters": {"rope_type": "default", "mrope_section": [4, 2, 2]}}
        vision = {"depth": 1, "num_heads": 2, "hidden_size": 32, "intermediate_size": 32, "out_hidden_size": 32}
        vision |= {"num_position_embeddings": 16, "deepstack_visual_indexes": [0], "patch_size": 7}
        config = transformers.Qwen3VLMoeConfig(text_config=text, vision_config=vision)
        kinds = {"text_config": attention, "vision_config": "eager"}
        model = transformers.Qwen3VLMoeForConditionalGeneration._from_config(config, attn_implementation=kinds)
    for name, weight in model.named_parameters():
        if "gate.weight" in name:
            weight.data.mul_(1e-5)
            if nudged:
                weight.data.add_(torch.randn_like(weight), alpha=1e-5)
    return model.float().eval()


def trace() -> RoutingReplay:
    return RoutingReplay(RoutingReplayConfig(), SIZES)


@torch.inference_mode()
def sampled(model: Any, *, rebuilds: bool = False) -> list[Completion]:
    """Two groups of two completions, decoded together; the second group's first prompt is shorter."""
    batch = DecodeBatch(model, (), CPU, {NAME: trace().record(model)})
    draw = np.random.default_rng(0)
    requests: list[GenerationRequest] = []
    for number, (prompt, length) in enumerate(((7, 6), (4, 9))):
        ids = draw.integers(1, 60, prompt).astype(np.int32)
        sampling = Sampling(temperature=1.0, max_new_tokens=length, stop_token_ids=())
        requests.append(GenerationRequest(number, EncodedPrompt.of_text(ids), 2, number, sampling))
    done = batch.join(batch.prefill(requests, 0))
    while batch.rows:
        done += batch.step(0)
        if rebuilds and batch.rows:
            batch.rebuild_cache()
    return [row.completion() for row in sorted(done, key=lambda row: (row.request.request_id, row.index))]


def groups_of(completions: Sequence[Completion]) -> list[TrainGroup]:
    draw, groups = np.random.default_rng(0), list[TrainGroup]()
    for number, length in enumerate((7, 4)):
        prompt = EncodedPrompt.of_text(draw.integers(1, 60, length).astype(np.int32))
        rows = tuple(
            PackedTrajectory(
                2 * number + c.index,
                c.token_ids,
                np.ones(len(c.token_ids), bool),
                traces={NAME: c.traces[NAME].completions},
            )
            for c in completions
            if c.request_id == number
        )
        first = next(c for c in completions if c.request_id == number)
        groups.append(TrainGroup(prompt, rows, traces={NAME: first.traces[NAME].prompt}))
    return groups


def gap(model: Any, completions: Sequence[Completion], replay: Any) -> float:
    """Largest difference of the learner's log-probs from the engine's, in nats; it takes the experts with `replay`."""
    packed = build_micro_batch(model, groups_of(completions), CPU)
    with torch.no_grad(), replay(packed.traces[NAME]):
        states = hidden_states(model, packed.inputs)[packed.predict_from]
    logprobs = scaled_logits(model, states).log_softmax(-1).gather(1, packed.targets[:, None])[:, 0]
    theirs = torch.from_numpy(np.concatenate([c.logprobs for c in completions]))
    return float((logprobs - theirs).abs().max())


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_vl_moe"])
def test_learner_takes_the_experts_of_the_engine(family: str) -> None:
    """A learner whose routers choose otherwise has the engine's log-probs with replay alone."""
    completions = sampled(model_of(family, attention="eager"))
    learner, own = model_of(family, nudged=True), model_of(family, nudged=True)
    assert gap(own, completions, no_replay) > 0.1
    assert gap(learner, completions, trace().replay(learner)) < 1e-3


def no_replay(_rows: torch.Tensor) -> Any:
    return torch.no_grad()


def test_a_rebuilt_cache_keeps_the_experts_that_tokens_were_predicted_with() -> None:
    model = model_of(attention="eager")
    for once, rebuilt in zip(sampled(model), sampled(model, rebuilds=True), strict=True):
        np.testing.assert_array_equal(once.token_ids, rebuilt.token_ids)
        for part in ("prompt", "completions"):
            np.testing.assert_array_equal(getattr(once.traces[NAME], part), getattr(rebuilt.traces[NAME], part))


@pytest.mark.parametrize(
    ("experts", "problem"),
    [([[0, 7], [3, 2]], ""), ([[0, 8], [3, 2]], "expert 8, of 8"), ([[0, 7], [3, 3]], "token 1 has the experts")],
)
def test_experts_that_a_server_cannot_have_chosen_are_named(experts: list[list[int]], problem: str) -> None:
    shape = ExpertShape.of(SIZES)
    assert shape is not None
    rows = np.zeros((2, shape.layers, shape.chosen), np.uint8)
    rows[:, 0] = experts
    assert shape.problem(rows.reshape(2, -1), [0]).startswith(problem)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"environment": {"name": "tests.rigs.lamp:Lamp"}, "data": {"max_response_length": 600}},
            "over the turns of an environment",
        ),
        ({"learner": {"num_processes": 2}}, "replay has not run with ranks"),
        ({}, "names no experts"),
    ],
)
def test_what_has_no_recorded_experts_is_refused(
    make_config: Callable[..., RunConfig], changes: dict[str, Any], told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        make_config(algorithm={"routing_replay": {}}, **changes)


def test_layers_that_keep_their_activations_go_on_keeping_them() -> None:
    model = model_of().train()
    checkpoint_layers(model, 1)
    trace().replay(model)
    assert [layer.gradient_checkpointing for layer in model.model.layers] == [True, False, False]
