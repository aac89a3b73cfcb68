"""The mathematics against published values and the house rules, and what a learner step makes of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.algorithms.advantages import grpo, rloo
from asyncrl.algorithms.aggregation import token_weights
from asyncrl.algorithms.corrections import correction_weights, ratio
from asyncrl.algorithms.diagnostics import off_policy_diagnostics
from asyncrl.algorithms.losses import PolicyTokens, ppo
from asyncrl.config.schema import AlgorithmConfig, CorrectionConfig, RunConfig
from asyncrl.models.loading import load_model
from asyncrl.models.processing import EncodedPrompt, PromptProcessor
from asyncrl.models.sampling_distribution import gather_logprobs, sampling_logprobs
from learner.batch import Batch, make_batch
from learner.engines.torch_engine import TorchEngine
from learner.packing import Completion, TrainGroup, build_micro_batch, plan_micro_batches
from learner.step import LearnerStep
from learner.ticket_writer import TicketWriter
from learner.tickets import ReceivedGroup
from protocol.messages import FinishReason, Group, GroupTimings, TrajectoryRecord, TrajectoryStatus

VECTORS = json.loads((Path(__file__).parent / "vectors.json").read_text())
LOSS = VECTORS["loss_inputs"]
MASK = torch.tensor(LOSS["mask"]).bool()
ROW = torch.arange(2)[:, None].expand(2, 4)[MASK]
GRPO = AlgorithmConfig()
SYMMETRIC = AlgorithmConfig(clip_ratio_high=0.2, clip_ratio_c=1e9)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def flat(rows: list[list[float]]) -> torch.Tensor:
    """The unmasked tokens of a padded [2, 4]."""
    return torch.tensor(rows)[MASK]


def close(got: torch.Tensor, expected: Any, tolerance: float = 2e-6) -> None:
    torch.testing.assert_close(got, torch.as_tensor(expected), atol=tolerance, rtol=tolerance)


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


# --- corrections ---------------------------------------------------------------------------------------


def test_truncated_importance_sampling() -> None:
    given = VECTORS["is_inputs"]
    behaviour = torch.zeros(7)
    proximal = flat(given["log_ratio"]).requires_grad_()
    close(ratio(proximal, behaviour).detach(), flat(given["ratio"]))
    weights = correction_weights(proximal, behaviour, CorrectionConfig(kind="token_tis", cap=2.0))
    close(weights, flat(VECTORS["tis_token_C2"]["w"]))
    assert not weights.requires_grad
    assert correction_weights(proximal, behaviour, CorrectionConfig(kind="none")).tolist() == [1.0] * 7


def test_decoupled_ppo() -> None:
    given = VECTORS["decoupled_ppo"]
    shaped = tokens(flat(LOSS["logp"]), given["prox_logp"], given["behave_logp"])
    close(ratio(shaped.logprobs, shaped.proximal_logprobs), flat(given["ratio"]))
    weights = correction_weights(shaped.proximal_logprobs, shaped.behaviour_logprobs, CorrectionConfig(cap=1e9))
    close(weights, flat(given["behave_weight"]))
    token_loss = weights * ppo(shaped, SYMMETRIC).token_loss
    close((token_weights(ROW, "token-mean", max_response_length=4) * token_loss).sum(), given["token_mean"])


def test_diagnostics() -> None:
    same = torch.tensor([-1.0, -2.0, -0.1])
    nothing = off_policy_diagnostics(same, same, 2.0)
    assert (nothing["ess"], nothing["mismatch_kl_k1"], nothing["mismatch_kl_k3"]) == (1.0, 0.0, 0.0)
    assert (nothing["ratio_max"], nothing["tis_clip_fraction"]) == (1.0, 0.0)
    behind = off_policy_diagnostics(torch.tensor([-1.0, 0.0]), torch.tensor([-2.0, 0.0]), 2.0)
    e = float(np.exp(1.0))
    assert behind["ess"] == pytest.approx((1 + e) ** 2 / (2 * (1 + e**2)), rel=1e-6)
    assert behind["mismatch_kl_k1"] == pytest.approx(-0.5)
    assert behind["mismatch_kl_k3"] == pytest.approx((e - 2) / 2, rel=1e-6)
    assert behind["tis_clip_fraction"] == 0.5
    assert off_policy_diagnostics(same[:0], same[:0], 2.0) == {}


# --- a learner step on a model ---------------------------------------------------------------------------


def made_up_batch(config: RunConfig, processor: PromptProcessor) -> Batch:
    """Random completions of unequal lengths with one unscored row; no engine involved."""
    rng = np.random.default_rng(0)
    writer = TicketWriter(config, processor, (1,))
    received = []
    size = config.batch.group_size
    usable = [i for i in range(len(processor.tokenizer)) if i not in processor.placeholder_ids]
    for number in range(config.batch.prompts_per_step):
        item = writer.write(number, 0)
        prompt = processor.encode(item.ticket.prompt, item.blobs)
        lengths = rng.integers(1, config.data.max_response_length + 1, size)
        total = int(lengths.sum())
        records = []
        for index in range(size):
            scored = (number, index) != (1, 2)
            status = TrajectoryStatus.FINISHED if scored else TrajectoryStatus.ERROR
            reward = float(rng.random()) if scored else None
            kind = "" if scored else "reward_exception"
            records.append(
                TrajectoryRecord(
                    status=status, finish_reason=FinishReason.STOP, error_kind=kind, reward=reward, turns=()
                )
            )
        mask = np.ones(total, np.uint8)
        mask[rng.random(total) < 0.1] = 0
        group = Group(
            ticket_id=number,
            server_id="s",
            prompt_ids=prompt.token_ids,
            image_grids=prompt.image_grids,
            image_hashes=prompt.image_hashes,
            lengths=lengths.astype(np.int32),
            token_ids=rng.choice(usable, total).astype(np.int32),
            loss_mask=mask,
            logprobs=(-6 + rng.normal(0, 0.3, total)).astype(np.float32),
            versions=np.zeros(total, np.int32),
            trajectories=tuple(records),
            timings=GroupTimings(queued_s=0, generate_s=0, reward_s=0),
        )
        received.append(ReceivedGroup(item, group))
    return make_batch(received, processor)


class _KeepGradients(TorchEngine):
    """Looks at the gradients instead of taking the step."""

    def optimizer_step(self) -> dict[str, float]:
        self.gradients = {
            name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in self.model.named_parameters()
        }
        self.model.zero_grad(set_to_none=True)
        return {"grad_norm": float(torch.stack([g.norm() for g in self.gradients.values()]).norm())}


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
        engine = _KeepGradients(config, config.learner.optim, 1)
        engine.prepare()
        metrics = LearnerStep(engine, config)(batch)
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
