"""The plan against measured tensors of real models on the CPU."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.checks.inputs import check_inputs, dry_run
from asyncrl.config.parts import PREFILL_TOKENS, cache_columns
from asyncrl.config.schema import RunConfig, changed
from asyncrl.errors import UserError
from asyncrl.memory_plan import GIB, size
from asyncrl.memory_plan.lines import CONTEXT_BYTES, prefilled_prompts
from asyncrl.memory_plan.live_bytes import LiveBytes, nbytes
from asyncrl.memory_plan.plan import MemoryPlan, check_plan, make_plan
from asyncrl.memory_plan.rehearsal import rehearse
from asyncrl.models import output_head, sampling_distribution
from asyncrl.models.loading import load_model
from asyncrl.models.published import published_tensors
from asyncrl.processing.encoded_prompt import EncodedPrompt
from benchmarks.random_models import make_model
from learner.loop.trainer import Trainer
from learner.network.publication import open_publication
from learner.training.engine import TorchEngine
from learner.training.roles import Critic
from protocol.messages import Sampling
from rollout_server.engines.base import GenerationRequest
from rollout_server.engines.hf.decode_batch import DecodeBatch
from rollout_server.engines.hf.decode_loop import DecodeLoop
from tests.rigs.full_micro_batch import full_micro_batch, image_prompt

MakeConfig = Callable[..., RunConfig]

PROMPT, RESPONSE, GROUP, GROUPS = SHAPE = 64, 32, 4, 2
ABOVE = 1.6
"""A plan is for the worst micro-batch (every token's logits, images in the place of every prompt token): at most so
many times what a usual one takes, and never below it."""


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    pass


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "tiny", "tiny")


def planned(make_config: MakeConfig, folder: Path, **sections: dict[str, Any]) -> RunConfig:
    base: dict[str, dict[str, Any]] = {
        "model": {"path": str(folder), "freeze_vision_tower": True},
        "data": {"max_prompt_length": PROMPT, "max_response_length": RESPONSE, "val_files": []},
        "batch": {"group_size": GROUP, "tokens_per_microbatch": GROUPS * (PROMPT + GROUP * RESPONSE)},
        "learner": {"device": "cpu"},
        "rollout": {"device": "cpu", "max_concurrent_sequences": 8},
    }
    for section, values in sections.items():
        base[section] = {**base.get(section, {}), **values}
    return make_config(**base)


def items(plan: MemoryPlan) -> str:
    """Names and reasons of all items, as text."""
    return "\n".join(f"{item.name}: {item.why}" for phase in plan.phases for item in phase.lines)


@pytest.mark.parametrize(
    ("dtype", "checkpointing", "frozen"),
    [("float32", False, False), ("float32", True, True), ("bfloat16", False, True), ("bfloat16", True, False)],
)
def test_an_update_takes_what_was_planned(
    make_config: MakeConfig, small: Path, dtype: str, checkpointing: bool, frozen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second update of two micro-batches by the real engine."""
    monkeypatch.setattr(sampling_distribution, "CACHED_VALUES", 2**40)  # in one piece, as on the GPU that is planned
    model = {"dtype": dtype, "freeze_vision_tower": frozen}
    config = planned(make_config, small, model=model, learner={"gradient_checkpointing": checkpointing})
    plan = rehearse(config)
    engine = TorchEngine(config.model_settings, config.learner.optim, 10)
    engine.prepare()
    trained = engine.unwrap_model()
    weights = [*trained.parameters(), *trained.buffers()]
    micro_batch = full_micro_batch(trained, SHAPE)
    for _ in range(2):
        engine.backward(engine.forward(micro_batch, entropy="value").logprobs.sum())
    gradients = [p.grad for p in trained.parameters() if p.grad is not None]
    with LiveBytes("cpu", known=[*weights, *gradients]) as live:
        engine.backward(engine.forward(micro_batch, entropy="value").logprobs.sum())
    assert live.peak <= plan.passing <= ABOVE * live.peak
    engine.optimizer_step()
    moments = [
        value for values in engine.updates.optimizer.state.values() for key, value in values.items() if key != "step"
    ]
    assert (plan.weights, plan.gradients, plan.moments) == (nbytes(weights), nbytes(gradients), nbytes(moments))
    assert plan.masters == nbytes(engine.updates.masters.copies())
    assert (plan.masters > 0) == (dtype == "bfloat16")
    assert plan.published == nbytes(t for _, t in published_tensors(trained))


def test_offload_leaves_weights_and_a_pass_on_the_device(make_config: MakeConfig, small: Path) -> None:
    sections: dict[str, dict[str, Any]] = {"model": {"dtype": "bfloat16"}, "algorithm": {"adv_estimator": "gae"}}
    config = planned(make_config, small, **sections, trainer={"mode": "sync"}, learner={"cpu_offload": True})
    plan = make_plan(config)
    assert plan.model.critic
    engine = TorchEngine(config.model_settings, config.learner.optim, 10)
    engine.prepare()
    model = engine.unwrap_model()
    micro_batch = full_micro_batch(model, SHAPE)
    engine.backward(engine.forward(micro_batch, entropy="value").logprobs.sum())
    with LiveBytes("cpu", known=[*model.parameters(), *model.buffers()]) as live:
        engine.backward(engine.forward(micro_batch, entropy="value").logprobs.sum())
    assert live.peak <= plan.model.passing <= ABOVE * live.peak
    engine.optimizer_step()
    on_host = [
        *engine.updates.masters.copies(),
        *(v for s in engine.updates.optimizer.state.values() for k, v in s.items() if k != "step"),
    ]
    assert plan.model.masters + plan.model.moments == nbytes(on_host)
    device = {line.name: line.nbytes for line in plan.phases[0].lines}
    assert device.keys() == {"weights", "critic", "working memory", "allocator"}
    assert device["critic"] == plan.model.critic.weights


def test_gradient_checkpointing_changes_memory_and_not_the_gradient(make_config: MakeConfig, small: Path) -> None:
    gradients = []
    for checkpointing in (False, True):
        config = planned(make_config, small, learner={"gradient_checkpointing": checkpointing})
        engine = TorchEngine(config.model_settings, config.learner.optim, 10)
        engine.prepare()
        engine.backward(engine.forward(full_micro_batch(engine.unwrap_model(), SHAPE)).logprobs.sum())
        gradients.append([p.grad for p in engine.unwrap_model().parameters() if p.grad is not None])
    assert len(gradients[0]) == len(gradients[1]) > 0
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_decoding_takes_what_was_planned(make_config: MakeConfig, small: Path, dtype: str) -> None:
    sections: dict[str, dict[str, Any]] = {"data": {"max_response_length": 8}, "trainer": {"mode": "sync"}}
    plan = make_plan(planned(make_config, small, model={"dtype": dtype}, **sections))
    model: Any = load_model(plan.config.model, device=torch.device("cpu")).eval().requires_grad_(False)
    assert plan.model.weights == nbytes([*model.parameters(), *model.buffers()])
    sampling = Sampling(temperature=1.0, max_new_tokens=8, stop_token_ids=(), banned_token_ids=())
    requests = [GenerationRequest(i, image_prompt(model, PROMPT), GROUP, i, sampling) for i in range(2)]
    batch = DecodeBatch(model, (), torch.device("cpu"))
    with LiveBytes("cpu", known=[*model.parameters(), *model.buffers()]) as live:
        batch.join(batch.prefill(requests, 0))
        for _ in range(6):
            batch.step(0)
        cached = nbytes(tensor for layer in batch._cache.layers for tensor in (layer.keys, layer.values))
    assert cached == 8 * cache_columns(PROMPT + 6) * plan.model.cache_per_token
    lines = {line.name: line.nbytes for line in plan.phases[1].lines}
    assert lines["KV cache"] == 8 * cache_columns(PROMPT + 8) * plan.model.cache_per_token
    assert live.peak <= lines["KV cache"] + lines["working memory"] <= 2 * live.peak


def test_later_turns_take_what_was_planned(make_config: MakeConfig, small: Path) -> None:
    """All rows at once end a turn, and are prefilled whole, four and eight tokens longer."""
    environment = {"name": "some.py:Where", "limits": {"turns": 3, "tokens_per_turn": 8, "images": 0}, "workers": 8}
    plan = make_plan(planned(make_config, small, trainer={"mode": "sync"}, environment=environment))
    model: Any = load_model(plan.config.model, device=torch.device("cpu")).eval().requires_grad_(False)
    stops = tuple(range(model.config.text_config.vocab_size))
    sampling = Sampling(temperature=1.0, max_new_tokens=8, stop_token_ids=stops, banned_token_ids=())
    prompt = image_prompt(model, PROMPT)
    requests = [GenerationRequest(i, prompt, GROUP, i, sampling) for i in range(2)]
    batch = DecodeBatch(model, (), torch.device("cpu"))
    with LiveBytes("cpu", known=[*model.parameters(), *model.buffers()]) as live:
        done = batch.join(batch.prefill(requests, 0))
        for turn in (1, 2):
            later: list[GenerationRequest] = []
            for number, row in enumerate(done):
                before = row.request.encoded_prompt(row.index)
                said = np.asarray([*row.token_ids, *[5] * (4 + 4 * (number % 2))], np.int32)
                longer = replace(before, pixel_values=None).followed_by([EncodedPrompt.of_text(said)])
                longer = replace(longer, pixel_values=prompt.pixel_values)  # one copy of them, which is the host's
                later.append(GenerationRequest(number, longer, 1, 0, sampling, stream=(number, turn)))
            assert len(later) == 8
            done.clear()
            done = batch.join(batch.prefill(later, 0))
    lines = {line.name: line.nbytes for line in plan.phases[1].lines}
    assert live.peak <= lines["KV cache"] + lines["working memory"]


def test_a_critic_takes_what_was_planned(make_config: MakeConfig, small: Path) -> None:
    """Beside a policy with adapters it is a whole model, with its own optimiser state."""
    config = planned(make_config, small, model={"lora": {"rank": 4}}, algorithm={"adv_estimator": "gae"})
    plan = rehearse(config)
    assert plan.critic
    critic = Critic(config.critic_settings, config.critic, 10)
    critic.prepare()
    weights = [*critic.model.parameters(), *critic.model.buffers()]
    micro_batch = full_micro_batch(critic.model, SHAPE)
    critic.backward(critic.values(micro_batch).sum())
    gradients = [p.grad for p in critic.model.parameters() if p.grad is not None]
    with LiveBytes("cpu", known=[*weights, *gradients]) as live:
        critic.backward(critic.values(micro_batch).sum())
    assert live.peak <= plan.critic.passing <= ABOVE * live.peak
    assert (plan.critic.weights, plan.critic.gradients) == (nbytes(weights), nbytes(gradients))
    lines = {line.name: line.nbytes for line in make_plan(config).phases[0].lines}
    assert lines["critic"] == nbytes(weights) + 3 * nbytes(gradients)
    assert "critic" not in {line.name for line in make_plan(planned(make_config, small)).phases[0].lines}


def test_an_offloaded_reference_has_the_place_of_the_gradients(make_config: MakeConfig, small: Path) -> None:
    config = planned(make_config, small, algorithm={"kl_loss_coef": 0.1}, model={"dtype": "bfloat16"}, learner={})
    config = changed(config, {"learner.device": "cuda"})
    model = rehearse(config)
    assert 0 < model.reference <= model.gradients * 1.2
    for ema in (0.0, 0.9):
        whole = changed(config, {"reference.ema": ema})
        model = rehearse(whole)
        there, offloaded = make_plan(whole, model), make_plan(changed(whole, {"reference.offload": True}), model)
        saved = min(model.reference, model.gradients)
        assert there.phases[0].nbytes - offloaded.phases[0].nbytes == saved


def test_adapters_are_all_that_is_trained_and_published(make_config: MakeConfig, small: Path) -> None:
    config = planned(make_config, small, model={"lora": {"rank": 4}})
    full, adapted = rehearse(planned(make_config, small)), rehearse(config)
    # rank * (in + out) of each linear layer of the text model: q, k, v, o, gate, up, down; adapters are fp32
    shapes = [(64, 64), (64, 32), (64, 32), (64, 64), (64, 128), (64, 128), (128, 64)]
    numbers = 2 * sum(4 * (a + b) for a, b in shapes)
    assert adapted.trained == numbers
    assert adapted.gradients == adapted.published == 4 * numbers
    assert adapted.moments == 2 * 4 * numbers
    assert adapted.parameters == full.parameters + numbers


# --- phases --------------------------------------------------------------------------------------


def test_phases_follow_who_shares_a_device(make_config: MakeConfig, small: Path) -> None:
    def phases(mode: str, learner: str, rollout: str) -> dict[str, int]:
        config = planned(
            make_config, small, trainer={"mode": mode}, learner={"device": learner}, rollout={"device": rollout}
        )
        return {phase.name: phase.nbytes for phase in make_plan(config).phases}

    together = phases("async", "auto", "auto")
    apart = phases("async", "cuda:0", "cuda:1")
    turns = phases("sync", "auto", "auto")
    assert list(apart) == list(turns) == ["learner awake", "engine awake"]
    assert list(together) == ["learner and engine at the same time"]
    assert sum(together.values()) == pytest.approx(sum(apart.values()), rel=1e-3)
    assert turns["learner awake"] == apart["learner awake"] + CONTEXT_BYTES, "the sleeper's context stays"


def test_a_plan_that_cannot_fit_is_refused_with_numbers_and_levers(make_config: MakeConfig, small: Path) -> None:
    sections: dict[str, dict[str, Any]] = {
        "data": {"max_response_length": 512},
        "batch": {"tokens_per_microbatch": 8192},
        "gpu_memory": {"budget_gib": 1.3},
        "trainer": {"mode": "sync"},
    }
    config = planned(make_config, small, learner={"device": "auto"}, rollout={"device": "auto"}, **sections)
    with pytest.raises(UserError) as refused:
        check_plan(config)
    assert check_plan(changed(config, {"gpu_memory.budget_gib": 0})) is None
    fits = check_plan(changed(config, {"gpu_memory.budget_gib": 4}))
    assert fits is not None
    assert fits.peak <= 4 * GIB
    text = str(refused.value)
    assert "gpu_memory.budget_gib is 1.3, but the learner awake needs" in text
    assert "asyncrl doctor --plan CONFIG" in text


def test_the_learners_gpu_is_the_limit_where_there_is_no_budget(
    make_config: MakeConfig, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before weights are loaded; what happens on another GPU is not counted."""
    tokens = {"data": {"max_response_length": 512}, "batch": {"tokens_per_microbatch": 8192}}
    devices: dict[str, dict[str, Any]] = {"learner": {"device": "cuda"}, "rollout": {"device": "cuda:1"}}
    config = planned(make_config, small, **tokens, **devices)
    (phase, _) = make_plan(config).phases
    gpu = type("Properties", (), {"total_memory": phase.nbytes - 1})()
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: gpu)
    said = rf"the learner's GPU has {size(phase.nbytes - 1)}, but the learner awake needs .*\nLower batch"
    with pytest.raises(UserError, match=said):
        Trainer(config, processor=None, num_rows=8)  # type: ignore[arg-type]
    fits = check_plan(config, phase.nbytes)
    assert fits is not None
    assert fits.phases == (phase,)
    assert check_plan(config) is None
    monkeypatch.setattr(output_head, "LOGITS_PER_CHUNK", 2**16)
    assert make_plan(config).phases[0].nbytes < phase.nbytes, "the logits of a chunk are counted, not all"


def test_a_gpus_chunks_of_the_output_layer_are_counted_by_its_budget(
    make_config: MakeConfig, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 48 GiB as three times a CPU's."""

    def passing(device: str, gib: int, logits: int) -> int:
        monkeypatch.setattr(output_head, "LOGITS_PER_CHUNK", logits)
        config = planned(make_config, small, learner={"device": device}, gpu_memory={"budget_gib": gib})
        return rehearse(config).passing

    few, more = passing("cpu", 48, 2**17), passing("cpu", 48, 3 * 2**17)
    assert few < more
    assert (passing("cuda", 16, 2**17), passing("cuda", 48, 2**17)) == (few, more)


def test_only_the_learner_needs_room_for_published_weights(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server may be on another machine, or start when two versions are published already."""
    nearly_full = type("Usage", (), {"free": 1000})()
    monkeypatch.setattr("shutil.disk_usage", lambda path: nearly_full)
    config = make_config(gpu_memory={"budget_gib": 4}, trainer={"mode": "sync"})
    check_inputs(config, "rollout_server")
    with pytest.raises(UserError, match=r"published weights need .* MiB free\. .*--shm-size=\d+g"):
        check_inputs(config, "learner")


def test_shared_memory_that_may_not_be_written_is_refused_before_a_service_starts(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the launcher, by a learner that was started without one, and as a note of what this machine has not."""
    monkeypatch.setattr("protocol.weights.SHARED_MEMORY", Path("/proc"))
    config, said = make_config(), r"weights cannot be published in /proc: .*chmod 1777 /proc"
    check_inputs(config, "rollout_server")
    with pytest.raises(UserError, match=said):
        check_inputs(config, "learner")
    with pytest.raises(UserError, match=said):
        open_publication("run")
    dry_run(config)
    assert re.search(f"note: this machine cannot train it: {said}", capsys.readouterr().out)


# --- what the engine keeps to --------------------------------------------------------------------


def test_the_engine_admits_no_more_prompt_tokens_at_once_than_planned(make_config: MakeConfig, small: Path) -> None:
    config = planned(make_config, small, rollout={"max_concurrent_sequences": 4096}, trainer={"mode": "sync"})
    assert prefilled_prompts(config) == PREFILL_TOKENS // PROMPT
    sampling = Sampling(temperature=1.0, max_new_tokens=8, stop_token_ids=(), banned_token_ids=())
    prompt = EncodedPrompt("row", np.full(PROMPT, 5, np.int32), np.zeros(PROMPT, np.int32), np.zeros((0, 3)), ())
    loop = DecodeLoop(lambda: DecodeBatch(None, (), torch.device("cpu")), 4096)
    requests = [GenerationRequest(i, prompt, GROUP, i, sampling) for i in range(600)]
    loop._queue.extend(requests)
    admitted: list[int] = []
    while taken := loop._take_admissible():
        admitted.append(len(taken))
    assert admitted == [256, 256, 88]


def test_a_version_that_is_evaluated_is_counted(make_config: MakeConfig, small: Path) -> None:
    base = {"data": {"max_prompt_length": PROMPT, "val_files": ["held_out.parquet"]}, "evaluation": {"every_steps": 5}}
    on_policy, beside = (
        make_plan(planned(make_config, small, **base, learner={"device": "cpu", "max_staleness": bound}))
        for bound in (0, 1)
    )
    assert on_policy.publications == 3 * on_policy.model.published
    assert beside.publications == 4 * beside.model.published
