"""The mathematics against published values and the house rules, and what a learner step makes of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.algorithms.advantages import grpo, rloo
from asyncrl.algorithms.losses import dppo, ppo, token_weights
from asyncrl.algorithms.ratios import PolicyTokens, ratio
from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.schema import RunConfig
from asyncrl.models.loading import load_model
from asyncrl.models.processing import EncodedPrompt, PromptProcessor
from asyncrl.models.sampling_distribution import gather_logprobs, sampling_logprobs
from asyncrl.models.wake_parity import fixed_prompt, fixed_tokens
from learner.training.engines.torch_engine import TorchEngine
from learner.training.packing import Completion, TrainGroup, build_micro_batch, plan_micro_batches
from learner.training.step import LearnerStep
from tests.rigs.made_up_batch import KeepGradients, made_up_batch
from tests.rigs.published_values import LOSS, MASK, ROW, SYMMETRIC, VECTORS, close, flat

pytestmark = pytest.mark.usefixtures("one_thread")
GRPO = AlgorithmConfig()


# --- advantages ------------------------------------------------------------------------------------


SCORES = torch.tensor(VECTORS["scores"]["s"])
GROUPS = torch.tensor([ord(uid) for uid in VECTORS["scores"]["uid"]])


@pytest.mark.parametrize(
    ("estimator", "config", "vector"),
    [
        (grpo, GRPO, "grpo"),
        (grpo, AlgorithmConfig(norm_adv_by_std=False), "dr_grpo"),
        (rloo, GRPO, "rloo"),
    ],
    ids=["grpo", "dr_grpo", "rloo"],
)
def test_published_advantages(estimator: Any, config: AlgorithmConfig, vector: str) -> None:
    close(estimator(SCORES, GROUPS, config), VECTORS[vector]["adv"])
    shuffled = torch.tensor([4, 0, 5, 2, 1, 3])
    close(estimator(SCORES[shuffled], GROUPS[shuffled], config), torch.tensor(VECTORS[vector]["adv"])[shuffled])


ESTIMATORS = pytest.mark.parametrize(
    ("estimator", "config"), [(grpo, GRPO), (grpo, AlgorithmConfig(norm_adv_by_std=False)), (rloo, GRPO)]
)


@ESTIMATORS
@pytest.mark.parametrize("scores", [[3.0], [0.1, 0.1, 0.1], [1e6 + 0.1] * 7, [-0.7] * 11, [0.0, 0.0]])
def test_no_spread_is_exactly_no_advantage(estimator: Any, config: AlgorithmConfig, scores: list[float]) -> None:
    advantages = estimator(torch.tensor(scores), torch.zeros(len(scores), dtype=torch.long), config)
    assert advantages.tolist() == [0.0] * len(scores)


@ESTIMATORS
def test_an_unscored_row_takes_no_part(estimator: Any, config: AlgorithmConfig) -> None:
    nan = float("nan")
    scores = torch.tensor([1.0, nan, 0.0, 0.0, nan, 5.0, nan])
    groups = torch.tensor([0, 0, 0, 0, 1, 1, 2])
    advantages = estimator(scores, groups, config)
    assert advantages[[1, 4, 5, 6]].tolist() == [0.0] * 4
    alone = estimator(torch.tensor([1.0, 0.0, 0.0]), torch.zeros(3, dtype=torch.long), config)
    assert advantages[[0, 2, 3]].tolist() == alone.tolist()


# --- losses ------------------------------------------------------------------------------------------


def tokens(logprobs: torch.Tensor, proximal: Any = None, behaviour: Any = None) -> PolicyTokens:
    old = flat(LOSS["old_logp"])
    return PolicyTokens(
        logprobs=logprobs,
        proximal_logprobs=old if proximal is None else flat(proximal),
        behaviour_logprobs=old if behaviour is None else flat(behaviour),
        advantages=flat(LOSS["adv"]),
        row=ROW,
    )


def test_ratios() -> None:
    close(ratio(flat(LOSS["logp"]), flat(LOSS["old_logp"])), flat(LOSS["ratio"]))
    assert torch.isfinite(ratio(torch.tensor([500.0]), torch.tensor([-500.0]))).all()


@pytest.mark.parametrize(
    ("vector", "config"),
    [
        ("ppo", SYMMETRIC),
        ("dapo_clip_higher", AlgorithmConfig(clip_ratio_c=1e9)),
        ("dual_clip", AlgorithmConfig(clip_ratio_high=0.2, clip_ratio_c=3.0)),
    ],
)
def test_published_losses_in_every_aggregation(vector: str, config: AlgorithmConfig) -> None:
    expected = VECTORS[vector]
    token_loss = ppo(tokens(flat(LOSS["logp"])), config).token_loss
    close(token_loss, flat(expected["token_loss"]))
    for mode, name, length in (
        ("token-mean", "token_mean", 4),
        ("seq-mean-token-mean", "seq_mean_token_mean", 4),
        ("seq-mean-token-sum-norm", "seq_mean_token_sum_norm", 2),
    ):
        weights = token_weights(ROW, mode, max_response_length=length)
        close((weights * token_loss).sum(), expected[name])


def test_rows_without_tokens_do_not_count() -> None:
    row = torch.tensor([0, 0, 7, 7, 7])
    close(token_weights(row, "seq-mean-token-mean", max_response_length=9), [1 / 4, 1 / 4, 1 / 6, 1 / 6, 1 / 6])
    close(token_weights(row, "seq-mean-token-sum-norm", max_response_length=10), [1 / 20] * 5)
    assert token_weights(row[:0], "seq-mean-token-mean", max_response_length=9).shape == (0,)
    with pytest.raises(ValueError, match="unknown loss_agg_mode 'sum'"):
        token_weights(row, "sum", max_response_length=9)


def test_gradients_vanish_where_clipped() -> None:
    logprobs = flat(LOSS["logp"]).requires_grad_()
    policy = ppo(tokens(logprobs), AlgorithmConfig())
    (gradient,) = torch.autograd.grad(policy.token_loss.sum(), logprobs)
    r, a = flat(LOSS["ratio"]), flat(LOSS["adv"])
    clipped = ((a > 0) & (r > 1.28)) | ((a < 0) & (r < 0.8)) | ((a < 0) & (r > 3.0))
    assert clipped.tolist() == [True, False, False, True, True, False, True]
    assert gradient[clipped].tolist() == [0.0] * 4
    close(gradient[~clipped], (-a * r)[~clipped])
    assert torch.stack(list(policy.indicators.values())).any(0).tolist() == clipped.tolist()


def test_at_the_proximal_policy_the_gradient_is_the_policy_gradient() -> None:
    logprobs = flat(LOSS["old_logp"]).requires_grad_()
    (gradient,) = torch.autograd.grad(ppo(tokens(logprobs), AlgorithmConfig()).token_loss.sum(), logprobs)
    close(gradient, -flat(LOSS["adv"]))


def test_dppo() -> None:
    given = VECTORS["dppo_tv_.2"]
    shaped = tokens(flat(LOSS["logp"]).requires_grad_())
    policy = dppo(shaped, AlgorithmConfig.model_validate({"dppo": {"kl_tau": 0.0}}))
    assert policy.indicators["clip_fraction_dppo"].tolist() == torch.tensor(given["masked"])[MASK].tolist()
    close((token_weights(ROW, "token-mean", max_response_length=4) * policy.token_loss).sum(), given["loss_token_mean"])
    (gradient,) = torch.autograd.grad(policy.token_loss.sum(), shaped.logprobs)
    assert ((gradient == 0) == policy.indicators["clip_fraction_dppo"]).all()
    with_kl = dppo(shaped, AlgorithmConfig.model_validate({"dppo": {"kl_tau": 0.5}})).token_loss
    close(with_kl - policy.token_loss, 0.5 * (shaped.logprobs - shaped.behaviour_logprobs) ** 2)


# --- a learner step on a model ---------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_micro_batching_changes_nothing(make_config: Callable[..., RunConfig], mode: str) -> None:
    results = []
    for budget in (72, 4096):
        config = make_config(
            data={"max_prompt_length": 64},
            batch={"tokens_per_microbatch": budget},
            algorithm={"loss_agg_mode": mode, "entropy_coeff": 0.01, "correction": {"cap": 2.0}},
        )
        processor = PromptProcessor(config.model)
        batch = made_up_batch(config, processor)
        engine = KeepGradients(config, config.learner.optim, 1)
        engine.prepare()
        metrics = LearnerStep(engine, config)(batch, 0)
        parts = len(plan_micro_batches(batch.train_groups, budget))
        results.append((parts, metrics["loss"], engine.gradients))
    (many, many_loss, many_gradients), (one, one_loss, one_gradients) = results
    assert many >= 4 > one == 1
    assert many_loss == pytest.approx(one_loss, rel=1e-5)
    norm = torch.stack([g.norm() for g in one_gradients.values()]).norm()
    assert norm > 0
    difference = torch.stack([(many_gradients[n] - g).norm() for n, g in one_gradients.items()]).norm()
    assert difference / norm < 1e-5


def _separately(model: Any, config: RunConfig, prompt: EncodedPrompt, completion: Completion) -> torch.Tensor:
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
    kept = torch.from_numpy(np.flatnonzero(completion.loss_mask))
    banned = torch.tensor(sorted(PromptProcessor(config.model).placeholder_ids))
    logprobs = sampling_logprobs(logits[start + kept], temperature=config.rollout.temperature, banned=banned)
    return gather_logprobs(logprobs, torch.from_numpy(completion.token_ids).long()[kept])


def test_gradients_have_the_same_bits_however_many_threads_add_them_up(make_config: Callable[..., RunConfig]) -> None:
    """The last state of the prompt predicts the first token of each of 64 completions, which two threads share."""
    config = make_config()
    engine = TorchEngine(config, config.learner.optim, 1)
    engine.prepare()
    ids = fixed_tokens(engine.model.get_output_embeddings().weight.shape[0], ())
    tokens = np.resize(ids, 12)
    completions = tuple(Completion(row, np.roll(tokens, row), np.ones_like(tokens)) for row in range(64))
    micro_batch = build_micro_batch(engine.model, [TrainGroup(fixed_prompt(ids), completions)], engine.device)
    weights = torch.linspace(0.5, 1.5, len(micro_batch.targets))

    def gradients() -> list[torch.Tensor]:
        engine.backward((engine.forward(micro_batch).logprobs * weights).sum())
        found = [p.grad for p in engine.model.parameters() if p.grad is not None]
        engine.clear_gradients()
        return found

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        first = gradients()
        for _ in range(12):
            assert all(torch.equal(a, b) for a, b in zip(first, gradients(), strict=True))
    finally:
        torch.set_num_threads(threads)


def test_packing_with_shared_prompts_equals_separate_passes(make_config: Callable[..., RunConfig]) -> None:
    """Log-probs and gradients, vision tower included."""
    config = make_config(rollout={"temperature": 0.7})
    processor = PromptProcessor(config.model)
    batch = made_up_batch(config, processor)
    engine = TorchEngine(config, config.learner.optim, 1)
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
    prompt = EncodedPrompt("d:0", np.arange(10), np.zeros(10, int), np.zeros((0, 3), int), (), None)
    completions = tuple(Completion(row, np.arange(6), np.ones(6)) for row in range(5))
    plan = plan_micro_batches([TrainGroup(prompt, completions)], 20)
    assert [[len(group.completions) for group in part] for part in plan] == [[2], [2], [1]]
    assert all(group.prompt is prompt for part in plan for group in part)
