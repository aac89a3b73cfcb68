"""A learner step: independent of micro-batching and packing, masked tokens silent, bad numbers named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from asyncrl.config.algorithm import Aggregation
from asyncrl.config.installed_methods import methods
from asyncrl.config.schema import RunConfig
from asyncrl.devices.sleeping import fixed_tokens
from asyncrl.models import output_head
from asyncrl.models.loading import load_model
from asyncrl.models.output_head import TokenOutputs
from asyncrl.models.sampling_distribution import gather_logprobs, sampling_logprobs
from asyncrl.processing.encoded_prompt import EncodedPrompt
from asyncrl.processing.processor import PromptProcessor
from learner.training.batch import Batch
from learner.training.engine import TorchEngine
from learner.training.engine_facts import ModelFlops
from learner.training.packing import MicroBatch, PackedTrajectory, TrainGroup, build_micro_batch, plan_micro_batches
from learner.training.roles import Roles
from learner.training.step import LearnerStep, NotFiniteError
from tests.rigs.made_up_batch import KeepGradients, made_up_batch

pytestmark = pytest.mark.usefixtures("one_thread")
MakeConfig = Callable[..., RunConfig]
KINDS = ("none", "token_tis", "sequence_tis", "geometric_tis", "token_mis", "sequence_mis", "geometric_mis", "icepop")
MASKS = ("sequence", "geometric", "veto", "dppo_tv", "opsm")
SETTINGS: dict[str, dict[str, Any]] = {
    **{kind: {"correction": {"kind": kind}} for kind in KINDS},
    **{mask: {"correction": {"kind": "none", "masks": [{"kind": mask}]}} for mask in MASKS},
    **{mode: {"loss_agg_mode": mode} for mode in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm")},
    **{
        name: {"correction": {"kind": "none"}, "selections": [name]}
        for name, method in methods("selection").items()
        if "inserted" not in method.needs  # those come with their loss
    },
    "all masks": {
        "correction": {"kind": "token_tis", "masks": [{"kind": mask} for mask in MASKS]},
        "selections": ["m2po"],
    },
    "loglinear": {"proximal": "loglinear"},
    "linear": {"proximal": "linear"},
    "behaviour": {"proximal": "behaviour", "correction": {"kind": "none"}},
    "target": {"proximal": "target"},
    **{name: {"policy_loss": name} for name in methods("policy_loss") if name != "ppo"},
    **{
        name: {"adv_estimator": name}
        for name, method in methods("advantage").items()
        if name not in ("grpo", "gpg", "dr_grpo") and not method.needs & {"critic", "greedy_row", "reference", "turns"}
    },
}
WIDE: dict[str, dict[str, float]] = {
    "sequence_mis": {"lower": 0.3, "upper": 3.0},
    "geometric_mis": {"lower": 0.85, "upper": 1.15},
    "sequence": {"lower": 0.3, "upper": 3.0},
    "geometric": {"lower": 0.85, "upper": 1.15},
    "veto": {"lower": 0.6},
    "opsm": {"upper": 0.05},
    "dppo_tv": {"lower": 1e-4, "upper": 1e-4},
}
"""Bounds that keep some of the made-up tokens and drop others."""
WHOLE = {"tokens_per_microbatch": 4096}


class KeepTokenGradients(KeepGradients):
    """An engine that also keeps the gradient of each token's log-prob, and counts its passes."""

    passes: list[bool]
    """Whether each forward pass was with gradient."""
    with_entropy: list[bool]
    """Whether it computed entropies."""

    def forward(self, micro_batch: MicroBatch, **asked: Any) -> TokenOutputs:
        outputs = super().forward(micro_batch, **asked)
        self.passes.append(outputs.logprobs.requires_grad)
        self.with_entropy.append(outputs.entropies is not None)
        if outputs.logprobs.requires_grad:
            outputs.logprobs.retain_grad()
            self.logprobs = outputs.logprobs
        return outputs


_PREPARED: dict[str, tuple[KeepTokenGradients, Batch]] = {}


def prepared(config: RunConfig) -> tuple[KeepTokenGradients, Batch]:
    """An engine whose weights never move, and a batch: the same for all tests of one model."""
    key = str(config.model.path)
    if key not in _PREPARED:
        engine = KeepTokenGradients(config.model_settings, config.learner.optim, 1)
        engine.prepare()
        _PREPARED[key] = engine, made_up_batch(config, PromptProcessor(config.model))
    engine, batch = _PREPARED[key]
    engine.passes, engine.with_entropy = [], []
    return engine, batch


def one_step(config: RunConfig) -> tuple[dict[str, float], KeepTokenGradients, int]:
    """Metrics, engine and the number of micro-batches of a step at version 3."""
    engine, batch = prepared(config)
    metrics = LearnerStep(Roles(engine), config.step_settings)(batch, 3)
    return metrics, engine, len(plan_micro_batches(batch.train_groups, config.batch.microbatch_tokens))


def widened(algorithm: dict[str, Any]) -> dict[str, Any]:
    correction = algorithm.get("correction", {})
    masks = [mask | WIDE.get(mask["kind"], {}) for mask in correction.get("masks", ())]
    return algorithm | {"correction": correction | WIDE.get(correction.get("kind", ""), {}) | {"masks": masks}}


@pytest.mark.parametrize("name", SETTINGS)
def test_micro_batching_changes_nothing(make_config: MakeConfig, name: str) -> None:
    results = []
    for budget in (72, 4096):
        config = make_config(
            data={"max_prompt_length": 64},
            batch={"tokens_per_microbatch": budget},
            algorithm=widened(SETTINGS[name]) | {"entropy_coeff": 0.01},
        )
        metrics, engine, parts = one_step(config)
        results.append((metrics, engine.gradients, parts))
    (many_metrics, many, parts), (metrics, one, single) = results
    assert parts >= 4 > single == 1
    assert many_metrics.keys() == metrics.keys()
    assert many_metrics["loss"] == pytest.approx(metrics["loss"], rel=1e-5, abs=1e-7)
    assert many_metrics["mask_fraction"] == metrics["mask_fraction"]
    if name in (*MASKS, "m2po") or name.endswith("mis") or name == "icepop":
        assert 0 < metrics["mask_fraction"] < 1, "the bounds of this test should split the tokens"
    norm = torch.stack([g.norm() for g in one.values()]).norm()
    assert norm > 0
    difference = torch.stack([(many[n] - g).norm() for n, g in one.items()]).norm()
    assert difference / norm < 1e-5


def test_masked_tokens_give_no_gradient_and_keep_their_place_in_the_denominator(make_config: MakeConfig) -> None:
    gradients = []
    metrics: dict[str, float] = {}
    for correction in ({"kind": "none"}, {"kind": "none", "masks": [{"kind": "veto", "lower": 0.6}]}):
        metrics, engine, _ = one_step(make_config(batch=WHOLE, algorithm={"correction": correction}))
        assert engine.logprobs.grad is not None
        gradients.append(engine.logprobs.grad)
    plain, vetoed = gradients
    gone = (vetoed == 0) & (plain != 0)
    assert 0 < int(gone.sum()) < len(plain)
    torch.testing.assert_close(vetoed[~gone], plain[~gone], rtol=0, atol=0)
    assert float((vetoed == 0).float().mean()) >= metrics["mask_fraction"] > 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_stands_at_tokens_that_are_not_trained_reaches_nothing(make_config: MakeConfig, bad: float) -> None:
    config = make_config(batch=WHOLE, algorithm={"entropy_coeff": 0.01, "selections": ["m2po"]})
    metrics, engine, _ = one_step(config)
    before, batch = engine.gradients, prepared(config)[1]
    behaviour = torch.where(batch.trained.place < 0, bad, batch.behaviour_logprobs)
    assert not behaviour.isfinite().all()
    assert LearnerStep(Roles(engine), config.step_settings)(replace(batch, behaviour_logprobs=behaviour), 3) == metrics
    assert all(torch.equal(gradient, before[name]) for name, gradient in engine.gradients.items())


ENTROPY_SUMS: dict[str, Callable[[int, int, int], float]] = {
    "token-mean": lambda tokens, rows, length: 1.0,
    "seq-mean-token-sum": lambda tokens, rows, length: tokens / rows,
    "seq-mean-token-sum-norm": lambda tokens, rows, length: tokens / rows / length,
}
"""Weight of the mean entropy of a batch's tokens, from its trained tokens, its rows with some, and the longest."""


@pytest.mark.parametrize("of_loss", get_args(Aggregation))
def test_the_entropy_bonus_is_a_mean_over_tokens_whatever_the_aggregation_of_the_loss(
    make_config: MakeConfig, of_loss: str
) -> None:
    assert entropy_bonus(make_config, loss_agg_mode=of_loss) == pytest.approx(1.0, rel=1e-4)


@pytest.mark.parametrize("mode", ENTROPY_SUMS)
def test_the_entropy_bonus_has_an_aggregation_of_its_own(make_config: MakeConfig, mode: str) -> None:
    """`seq-mean-token-sum` is a completion's length times the mean, as verl's loss_agg_mode makes of it."""
    config = make_config(batch=WHOLE)
    row = prepared(config)[1].trained.row
    expected = ENTROPY_SUMS[mode](len(row), len(row.unique()), config.data.max_response_length)
    found = entropy_bonus(make_config, entropy_agg_mode=mode, loss_agg_mode="seq-mean-token-mean")
    assert found == pytest.approx(expected, rel=1e-4)


def entropy_bonus(make_config: MakeConfig, **algorithm: str) -> float:
    """Entropy bonus of a step's loss, over its coefficient and the mean entropy of a token."""
    plain, _, _ = one_step(make_config(batch=WHOLE, algorithm={"entropy_coeff": 0.0, **algorithm}))
    metrics, _, _ = one_step(make_config(batch=WHOLE, algorithm={"entropy_coeff": 0.5, **algorithm}))
    return (plain["loss"] - metrics["loss"]) / 0.5 / metrics["entropy"]


def test_a_masked_token_trains_through_neither_entropy_nor_kl(make_config: MakeConfig) -> None:
    algorithm: dict[str, Any] = {"entropy_coeff": 0.1, "kl_loss_coef": 0.1, "correction": {"kind": "none"}}
    veto = {"kind": "veto", "lower": 0.999, "upper": 1.001}
    gradients: list[bool] = []
    for masks in ([], [veto]):
        algorithm["correction"]["masks"] = masks
        config = make_config(batch=WHOLE, model={"lora": {"rank": 1}}, algorithm=algorithm)
        engine = KeepGradients(config.model_settings, config.learner.optim, 1)
        engine.prepare()
        for name, parameter in engine.model.named_parameters():
            if "lora_B" in name:  # an adapter that changes something, so that there is a KL
                torch.nn.init.constant_(parameter, 0.01)
        metrics = LearnerStep(Roles(engine), config.step_settings)(prepared(make_config())[1], 3)
        assert metrics["reference_kl"] > 0
        assert metrics["mask_fraction"] == len(masks)
        gradients.append(any(bool(gradient.any()) for gradient in engine.gradients.values()))
    assert gradients == [True, False]


def test_a_selection_takes_its_tokens_from_what_its_method_says(make_config: MakeConfig) -> None:
    def step(*selections: str) -> tuple[dict[str, float], torch.Tensor]:
        settings = {"selections": selections, "entropy_coeff": 0.0, "loss_agg_mode": "seq-mean-token-mean"}
        metrics, engine, _ = one_step(make_config(batch=WHOLE, algorithm=settings))
        assert engine.logprobs.grad is not None
        return metrics, engine.logprobs.grad

    _, plain = step()
    metrics, of_forks = step("top_entropy")
    silent = (of_forks == 0) & (plain != 0)
    assert metrics["mask_fraction_top_entropy"] == pytest.approx(float((of_forks == 0).float().mean()), abs=0.02)
    assert metrics["mask_fraction"] == 0, "it leaves entropy bonus and KL as they are"
    torch.testing.assert_close(of_forks[~silent], plain[~silent])


@pytest.mark.parametrize(
    ("proximal", "updates", "selections", "passes"),
    [
        ("recompute", 1, (), 0),
        ("recompute", 2, (), 1),
        ("recompute", 1, ("m2po",), 1),
        ("loglinear", 2, (), 0),
        ("linear", 2, (), 0),
        ("target", 2, (), 0),
    ],
)
def test_only_recomputing_costs_a_forward_pass(
    make_config: MakeConfig, proximal: str, updates: int, selections: Any, passes: int
) -> None:
    algorithm = {"updates_per_batch": updates, "proximal": proximal, "selections": selections}
    _, engine, _ = one_step(make_config(batch=WHOLE, algorithm=algorithm))
    assert engine.passes.count(False) == passes
    assert engine.passes.count(True) == updates
    assert engine.with_entropy == engine.passes, "entropies are for the report, which reads those of the training pass"


def test_a_batch_without_trained_tokens_makes_no_step(make_config: MakeConfig) -> None:
    config = make_config(algorithm={"selections": ["m2po"]})
    engine, batch = prepared(config)
    assert LearnerStep(Roles(engine), config.step_settings)(replace(batch, train_groups=()), 3) == {}


# --- numbers that are not finite ----------------------------------------------------------------------


class BadLogprob(TorchEngine):
    """The log-prob of the first token of the second micro-batch is not a number."""

    calls = 0

    def forward(self, micro_batch: MicroBatch, **asked: Any) -> TokenOutputs:
        outputs = super().forward(micro_batch, **asked)
        self.calls += 1
        if self.calls == 2:
            outputs.logprobs[0] = float("nan")
        return outputs


class BadGradient(TorchEngine):
    """Every micro-batch has a finite loss and an infinite gradient."""

    def forward(self, micro_batch: MicroBatch, **asked: Any) -> TokenOutputs:
        outputs = super().forward(micro_batch, **asked)
        outputs.logprobs.register_hook(lambda gradient: gradient / 0.0)
        return outputs


@pytest.mark.parametrize(
    ("engine_class", "number", "says"),
    [
        (
            BadLogprob,
            "loss",
            r"step 7 \(policy version 6\), update 1 of 1, micro-batch 2: the loss is nan: the learner's log-prob is "
            r"not finite at 1 of \d+ tokens, in rl.parquet:\d+ \(completion \d\)",
        ),
        (BadGradient, "grad_norm", r"step 7 \(policy version 6\), update 1 of 1: the gradient norm is nan"),
    ],
)
def test_a_bad_number_stops_the_run_before_the_update(
    make_config: MakeConfig, engine_class: type[TorchEngine], number: str, says: str
) -> None:
    config = make_config(data={"max_prompt_length": 64}, batch={"tokens_per_microbatch": 72})
    engine = engine_class(config.model_settings, config.learner.optim, 1)
    engine.prepare()
    before = {name: p.detach().clone() for name, p in engine.model.named_parameters()}
    with pytest.raises(NotFiniteError, match=says) as stop:
        LearnerStep(Roles(engine), config.step_settings)(prepared(config)[1], 6)
    assert stop.value.number == number
    assert all(torch.equal(before[name], p) for name, p in engine.model.named_parameters())


# --- packing ------------------------------------------------------------------------------------------


def _separately(model: Any, config: RunConfig, prompt: EncodedPrompt, completion: PackedTrajectory) -> torch.Tensor:
    """Log-probs of the completion's counted tokens from one plain forward pass of prompt + completion."""
    ids = np.concatenate([prompt.token_ids, completion.token_ids])[None]
    types = np.concatenate([prompt.token_types, np.zeros_like(completion.token_ids)])[None]
    inputs: dict[str, Any] = {"input_ids": torch.from_numpy(ids).long()}
    if prompt.pixel_values is not None:
        inputs["pixel_values"] = prompt.pixel_values
        inputs["image_grid_thw"] = torch.from_numpy(prompt.image_grids).long()
        inputs["mm_token_type_ids"] = torch.from_numpy(types).long()
    logits = model(**inputs, use_cache=False).logits[0]
    start = len(prompt.token_ids) - 1
    kept = torch.from_numpy(np.flatnonzero(completion.is_trained))
    banned = torch.tensor(sorted(PromptProcessor(config.model).placeholder_ids))
    logprobs = sampling_logprobs(logits[start + kept], temperature=config.rollout.temperature, banned=banned)
    return gather_logprobs(logprobs, torch.from_numpy(completion.token_ids).long()[kept])


def test_packing_with_shared_prompts_equals_separate_passes(make_config: MakeConfig) -> None:
    """Log-probs and gradients, vision tower included."""
    config = make_config(rollout={"temperature": 0.7})
    _, batch = prepared(config)
    engine = TorchEngine(config.model_settings, config.learner.optim, 1)
    engine.prepare()
    plain: Any = load_model(config.model, device=torch.device("cpu")).train()

    micro_batch = build_micro_batch(engine.model, batch.train_groups, engine.device)
    packed = engine.forward(micro_batch).logprobs
    separate = torch.cat(
        [_separately(plain, config, group.prompt, c) for group in batch.train_groups for c in group.completions]
    )
    torch.testing.assert_close(packed, separate, atol=1e-5, rtol=1e-5)

    direction = torch.randn(len(packed), generator=torch.Generator().manual_seed(0))
    (packed * direction).sum().backward()
    (separate * direction).sum().backward()
    theirs = dict(plain.named_parameters())
    for name, parameter in engine.model.named_parameters():
        assert (parameter.grad is None) == (theirs[name].grad is None), name
        if parameter.grad is not None:
            scale = theirs[name].grad.norm().clamp_min(1e-6)
            assert (parameter.grad - theirs[name].grad).norm() / scale < 1e-4, name


def test_a_group_over_the_budget_is_split_with_its_prompt() -> None:
    prompt = EncodedPrompt("d:0", np.arange(10), np.zeros(10, int), np.zeros((0, 3), int), ())
    completions = tuple(PackedTrajectory(row, np.arange(6), np.ones(6)) for row in range(5))
    plan = plan_micro_batches([TrainGroup(prompt, completions)], 20)
    assert [[len(group.completions) for group in part] for part in plan] == [[2], [2], [1]]
    assert all(group.prompt is prompt for part in plan for group in part)


@pytest.mark.parametrize("chunks", [1, 30])
def test_gradients_have_the_same_bits_however_many_threads_add_them_up(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, chunks: int
) -> None:
    """The last state of the prompt predicts the first token of each of 64 completions, which two threads share."""
    engine, _ = prepared(make_config())
    vocabulary = engine.model.get_output_embeddings().weight.shape[0]
    monkeypatch.setattr(output_head, "LOGITS_PER_CHUNK", 64 * 12 * vocabulary // chunks)
    ids = fixed_tokens(engine.model.get_output_embeddings().weight.shape[0], ())
    tokens = np.resize(ids, 12)
    completions = tuple(PackedTrajectory(row, np.roll(tokens, row), np.ones_like(tokens)) for row in range(64))
    micro_batch = build_micro_batch(engine.model, [TrainGroup(EncodedPrompt.of_text(ids), completions)], engine.device)
    weights = torch.linspace(0.5, 1.5, len(micro_batch.targets))

    def gradients() -> list[torch.Tensor]:
        engine.backward((engine.forward(micro_batch).logprobs * weights).sum())
        found = [p.grad for p in engine.model.parameters() if p.grad is not None]
        engine.updates.optimizer.zero_grad(set_to_none=True)
        return found

    torch.set_num_threads(2)  # until the end of the test: `one_thread` puts back what was before
    first = gradients()
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(first, gradients(), strict=True))


class Operations(TorchDispatchMode):
    """Keeps the name of each operation."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_layers_sort_no_indices(make_config: MakeConfig) -> None:
    """Torch would add up gradients of gathered tokens by sorting all indices."""
    engine, batch = prepared(make_config())
    micro_batch = build_micro_batch(engine.model, batch.train_groups, engine.device)
    with Operations() as operations:
        engine.backward(engine.forward(micro_batch).logprobs.sum())
    engine.updates.optimizer.zero_grad(set_to_none=True)
    # The one is that of the states which predict a trained token: a prompt's last one predicts several.
    assert sum("index_put" in name for name in operations.seen) == 1


# --- floating-point operations ------------------------------------------------------------------------

PROJECTIONS = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.convolution, torch.ops.aten.convolution_backward)


@pytest.mark.parametrize(
    ("model", "tolerance"),
    [
        ({"freeze_vision_tower": False}, 0.05),
        ({"freeze_vision_tower": True}, 0.05),
        ({"lora": {"rank": 1}}, 0.1),  # the lowest of two layers passes no gradient on
    ],
)
def test_model_flops_agree_with_torchs_count_of_matrix_products(
    make_config: MakeConfig, model: dict[str, Any], tolerance: float
) -> None:
    config = make_config(model=model)
    engine = TorchEngine(config.model_settings, config.learner.optim, 1)
    engine.prepare()
    _, batch = prepared(config)
    micro_batch = build_micro_batch(engine.unwrap_model(), batch.train_groups, engine.device)
    counter = FlopCounterMode(display=False)
    with counter:
        engine.forward(micro_batch).logprobs.sum().backward()
    counted = sum(flops for op, flops in counter.get_flop_counts()["Global"].items() if op in PROJECTIONS)
    assert ModelFlops(engine.unwrap_model()).of(batch.train_groups) == pytest.approx(counted, rel=tolerance)
