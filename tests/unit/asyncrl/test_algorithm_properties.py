"""Properties of every estimator, loss and aggregation, on random batches.

The house rules of a step's mathematics, and where each is tested: log-probs are of the sampled distribution
(test_truncated_sampling.py, test_output_head.py); masked tokens are silent (test_step.py); groups of one, groups
without spread and rows without a score (here and test_advantages.py); rows without tokens, micro-batches, packing and
denominators (here, with a model in test_step.py); corrections leave denominators (test_step.py); what is decided
before an update is fp32 and has no gradient (here); a policy that has moved is never taken for the one of the step's
start (test_step.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, get_args
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.algorithms.corrections import correct
from asyncrl.algorithms.loading import load_method
from asyncrl.algorithms.losses import update_weights
from asyncrl.algorithms.ratios import PolicyTokens
from asyncrl.algorithms.selections import Selections
from asyncrl.algorithms.trajectories import Credit, Trajectories
from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.correction import CorrectionConfig
from asyncrl.config.installed_methods import methods
from tests.rigs.provenance import provenance_of

pytestmark = pytest.mark.usefixtures("one_thread")
ESTIMATORS, LOSSES = list(methods("advantage")), list(methods("policy_loss"))
AGGREGATIONS = get_args(AlgorithmConfig.model_fields["loss_agg_mode"].annotation)
MARKING = [name for name in LOSSES if methods("policy_loss")[name].marks]
"""Losses whose marks are drawn, or decided by the order of equal tokens."""
FOR_SMALL_BATCHES: dict[str, dict[str, Any]] = {
    "clip_cov": {"random_covariance": {"fraction": 0.3}},
    "kl_cov": {"top_covariance": {"fraction": 0.3}},
    "passk_training": {"passk_training": {"k": 2}},
    "gkd": {"gkd": {"reward_weight": 1.0}},
}
"""Settings of methods whose defaults choose nothing in a small batch, or give no credit for rewards."""
SUM_TO_ZERO = [name for name in ("grpo", "dr_grpo", "rloo", "maxrl", "lite_ppo") if name in ESTIMATORS]
quick = settings(max_examples=60, deadline=None, derandomize=True, database=None)


@dataclass(frozen=True)
class Made:
    """A random batch. Rows are lists, tokens are lists of rows' lists: easy to put in another order."""

    group: tuple[int, ...]
    scores: tuple[float, ...]
    tokens: tuple[torch.Tensor, ...]
    """Of each row [l, 7]: target, proximal and behaviour log-prob, reward, value, entropy, squared probability."""

    def in_order(self, order: Sequence[int]) -> Made:
        return Made(*(tuple(column[i] for i in order) for column in (self.group, self.scores, self.tokens)))

    @property
    def flat(self) -> torch.Tensor:
        return torch.cat([torch.zeros(0, 7), *self.tokens])

    def trajectories(self) -> Trajectories:
        lengths = torch.tensor([len(tokens) for tokens in self.tokens])
        scores = torch.tensor(self.scores)
        row = torch.arange(len(lengths)).repeat_interleave(lengths)
        _, proximal, behaviour, rewards, values, entropies, squares = self.flat.unbind(1)
        place = torch.cat([torch.zeros(0, dtype=torch.long), *(torch.arange(len(tokens)) for tokens in self.tokens)])
        return Trajectories(
            scores=scores,
            group=torch.tensor(self.group),
            row=row,
            behaviour_logprobs=behaviour,
            components={"half": scores / 2, "all": scores},
            token_rewards=rewards,
            provenance=provenance_of(row, baseline=self._is_baseline()),
            proximal_logprobs=proximal,
            entropies=entropies,
            squared_probabilities=squares,
            values=values,
            reference_logprobs=behaviour - squares,
            outcomes=scores / 2,
            turn=place // 2,
            turn_rewards=squares * (place % 2),
            state=place // 2 * ((scores > 0.3).long()[row] - (scores > 1).long()[row] * 2),
        )

    def _is_baseline(self) -> torch.Tensor:
        """[B] bool: rows without tokens. Of several in a group those of the best score: a group has one baseline."""
        empty = [len(tokens) == 0 for tokens in self.tokens]
        best: dict[int, float] = {}
        for group, score, is_empty in zip(self.group, self.scores, empty, strict=True):
            best[group] = max(best.get(group, 0.0), score if is_empty else 0.0)
        facts = zip(self.group, self.scores, empty, strict=True)
        return torch.tensor([is_empty and score == best[group] for group, score, is_empty in facts])


@st.composite
def batches(draw: st.DrawFn, shortest: int = 0) -> Made:
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    group = [number for number, size in enumerate(sizes) for _ in range(size)]
    lengths = [draw(st.integers(shortest, 4)) for _ in group]
    scores = [draw(st.sampled_from([0.0, 0.1, 0.5, 1.0, 2.0])) for _ in group]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))

    def row(length: int, score: float) -> torch.Tensor:
        columns = torch.rand(length, 7, generator=generator)
        columns[:, :3] = -0.1 - 2 * columns[:, :1] + 0.6 * (columns[:, :3] - 0.5)
        columns[:, 3] = 0.0
        columns[-1:, 3] = score
        return columns

    return Made(
        tuple(group), tuple(scores), tuple(row(length, score) for length, score in zip(lengths, scores, strict=True))
    )


@cache
def config_of(estimator: str, loss: str, mode: str) -> AlgorithmConfig:
    needs, of_loss = methods("advantage")[estimator].needs, methods("policy_loss")[loss].needs
    refused = "critic" in needs and "inserted" in of_loss
    chosen = "grpo" if refused else estimator
    given: Any = {"adv_estimator": chosen, "policy_loss": loss, "loss_agg_mode": mode, "proximal": "recompute"}
    return AlgorithmConfig.model_validate(given | FOR_SMALL_BATCHES.get(loss, {}) | FOR_SMALL_BATCHES.get(chosen, {}))


def estimate(name: str, made: Made, config: AlgorithmConfig | None = None) -> Credit:
    config = config or config_of(name, "ppo", "token-mean")
    return load_method("advantage", name, "adv_estimator")(made.trajectories(), config)


def updates(
    made: Made, estimator: str, loss: str, modes: Sequence[str], parts: Sequence[Sequence[int]] = ()
) -> list[torch.Tensor]:
    """Per aggregation [N], the gradient of an update's loss by its log-probs, in micro-batches of these rows (all in
    one by default). Aggregations are weights of tokens, and nothing else reads them."""
    config, t = config_of(estimator, loss, modes[0]), made.trajectories()
    assert t.entropies is not None
    is_hybrid = "inserted" in methods("policy_loss")[loss].needs
    inserted = (t.entropies > 0.7) & is_hybrid  # wherever they are: rows with none, some and nothing else
    provenance = provenance_of(t.row, inserted)
    credit = estimate(config.adv_estimator, made, config)
    marked = Selections(config)(replace(t, provenance=provenance), credit).marked
    configs = [config_of(estimator, loss, mode) for mode in modes]
    weights = [update_weights(t.row, t.group[t.row], inserted, each, max_response_length=5).loss for each in configs]
    target, proximal, behaviour = (made.flat[:, column].clone() for column in range(3))
    target.requires_grad_()
    totals = [torch.zeros(()) for _ in modes]
    for rows in parts or [range(len(made.group))]:
        here = torch.cat([torch.zeros(0, dtype=torch.long), *((t.row == row).nonzero()[:, 0] for row in rows)])
        tokens = PolicyTokens(
            target[here],
            proximal[here],
            behaviour[here],
            credit.advantages[here],
            t.row[here],
            None if marked is None else marked[here],
            provenance.of_tokens(here),
            t.entropies[here],
            t.scores[t.row[here]],
        )
        correction = correct(tokens, config.correction)
        token_loss = load_method("policy_loss", loss, "policy_loss")(tokens, config).token_loss
        corrected = torch.where(correction.masked, 0.0, correction.weights * token_loss)
        totals = [total + (each[here] * corrected).sum() for total, each in zip(totals, weights, strict=True)]
    return [torch.autograd.grad(total, target, materialize_grads=True, retain_graph=True)[0] for total in totals]


def update(made: Made, estimator: str, loss: str, mode: str, parts: Sequence[Sequence[int]] = ()) -> torch.Tensor:
    """[N] gradient by one aggregation."""
    return updates(made, estimator, loss, [mode], parts)[0]


def close(got: torch.Tensor, expected: torch.Tensor, tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)


combination = st.tuples(st.sampled_from(ESTIMATORS), st.sampled_from(LOSSES), st.sampled_from(AGGREGATIONS))

# --- all combinations ------------------------------------------------------------------------------


def test_every_estimator_goes_with_every_loss_and_aggregation() -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = tuple(-0.1 - torch.rand(length, 7, generator=generator) for length in (3, 2, 0, 1, 4))
    for columns in tokens:
        columns[:, 1:3] = columns[:, :1]  # nothing is clipped
    made = Made((0, 0, 0, 1, 1), (1.0, 0.0, 0.5, 0.0, 1.0), tokens)
    modes = list(AGGREGATIONS)
    for estimator, loss in itertools.product(ESTIMATORS, LOSSES):
        for mode, gradient in zip(modes, updates(made, estimator, loss, modes), strict=True):
            assert gradient.isfinite().all(), (estimator, loss, mode)
            assert gradient.any(), (estimator, loss, mode)


@given(batches(), combination, st.randoms(use_true_random=False))
@quick
def test_micro_batches_and_the_order_in_which_they_are_packed_change_nothing(
    made: Made, chosen: tuple[str, str, str], random: Any
) -> None:
    rows = list(range(len(made.group)))
    random.shuffle(rows)
    cut = random.randint(0, len(rows))
    close(update(made, *chosen, parts=[rows[:cut], rows[cut:]]), update(made, *chosen))
    close(update(made, *chosen, parts=[[row] for row in rows]), update(made, *chosen))


@given(batches(), combination.filter(lambda chosen: chosen[1] not in MARKING), st.randoms(use_true_random=False))
@quick
def test_rows_in_another_order_learn_the_same(made: Made, chosen: tuple[str, str, str], random: Any) -> None:
    order = list(range(len(made.group)))
    random.shuffle(order)
    where = torch.arange(len(made.flat)).split([len(tokens) for tokens in made.tokens])
    moved = torch.cat([torch.zeros(0, dtype=torch.long), *(where[row] for row in order)])
    close(update(made.in_order(order), *chosen), update(made, *chosen)[moved])


@given(batches(), combination.filter(lambda chosen: chosen[1] not in MARKING), st.integers(0, 3))
@quick
def test_rows_that_have_no_score_and_train_nothing_change_nothing(
    made: Made, chosen: tuple[str, str, str], group: int
) -> None:
    nothing, nan = torch.zeros(0, 7), float("nan")
    group = min(group, max(made.group) + 1)
    longer = Made((*made.group, group), (*made.scores, nan), (*made.tokens, nothing))
    if chosen[0] != "remax":  # there it is the greedy row
        assert torch.equal(update(longer, *chosen), update(made, *chosen))


# --- advantages --------------------------------------------------------------------------------------


@given(batches(), st.sampled_from(ESTIMATORS))
@quick
def test_what_is_decided_before_an_update_is_fp32_without_gradient(made: Made, name: str) -> None:
    credit = estimate(name, made)
    for column in (credit.advantages, credit.returns):
        if column is not None:
            assert column.dtype == torch.float32
            assert column.shape == (len(made.flat),)
            assert not column.requires_grad
            assert column.isfinite().all()


@given(batches(shortest=1))
@quick
def test_advantages_of_a_group_add_up_to_zero(made: Made) -> None:
    t = made.trajectories()
    last = t.lengths.cumsum(0) - 1
    for name in SUM_TO_ZERO:
        of_row = estimate(name, made).advantages[last]
        close(torch.zeros(4).index_add(0, t.group, of_row), torch.zeros(4), 1e-4)


@given(batches(shortest=1), st.floats(0.25, 4.0), st.floats(-2.0, 2.0))
@quick
def test_scale_and_offset_of_rewards(made: Made, scale: float, offset: float) -> None:
    def scored(by: float, plus: float) -> Made:
        return Made(made.group, tuple(score * by + plus for score in made.scores), made.tokens)

    close(estimate("grpo", scored(scale, offset)).advantages, estimate("grpo", made).advantages, 2e-4)
    close(estimate("dr_grpo", scored(scale, offset)).advantages, scale * estimate("dr_grpo", made).advantages, 2e-4)
    close(estimate("rloo", scored(scale, offset)).advantages, scale * estimate("rloo", made).advantages, 2e-4)


# --- losses --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_agree_with_differences(name: str) -> None:
    """In float64. What a loss detaches stays, for the differences, what it is where they are taken."""
    proximal = torch.tensor([-1.0, -0.5, -2.0, -0.7, -0.3, -0.9], dtype=torch.float64)
    moved = proximal + torch.tensor([0.03, -0.05, 0.08, 0.01, -0.02, 0.04], dtype=torch.float64)
    behaviour = proximal - torch.tensor([0.01, 0.02, -0.03, 0.04, 0.01, -0.02], dtype=torch.float64)
    advantages = torch.tensor([1.0, 1.0, -0.5, -0.5, 2.0, -1.0], dtype=torch.float64)
    row, marked = torch.tensor([0, 0, 1, 1, 2, 3]), torch.tensor([False, True, False, True, False, False])
    config, loss = config_of("grpo", name, "token-mean"), load_method("policy_loss", name, "policy_loss")
    detach = torch.Tensor.detach

    def value(logprobs: torch.Tensor) -> torch.Tensor:
        with patch.object(torch.Tensor, "detach", lambda own: moved if own is logprobs else detach(own)):
            provenance = provenance_of(row, marked)
            columns = (proximal, behaviour, advantages, row, marked, provenance, -proximal, advantages)
            return loss(PolicyTokens(logprobs, *columns), config).token_loss

    assert torch.autograd.gradcheck(value, (moved.clone().requires_grad_(),))


@given(batches(shortest=1), st.sampled_from(["token", "sequence", "geometric"]))
@quick
def test_truncation_and_masks_whose_bounds_are_far_away_are_plain_importance_sampling(made: Made, level: str) -> None:
    t = made.trajectories()
    target, proximal, behaviour = made.flat[:, :3].unbind(1)
    tokens = PolicyTokens(target, proximal, behaviour, torch.ones_like(target), t.row)
    difference = (proximal - behaviour).double()
    sums = torch.zeros(len(t.scores), dtype=torch.float64).index_add(0, t.row, difference)
    means = sums / t.lengths.clamp_min(1)
    expected = {"token": difference, "sequence": sums[t.row], "geometric": means[t.row]}[level].exp().float()
    far: dict[str, Any] = {f"{level}_tis": {"upper": 1e9}, f"{level}_mis": {"lower": 0.0, "upper": 1e9}}
    for kind, bounds in far.items():
        close(correct(tokens, CorrectionConfig(kind=kind, **bounds)).weights, expected)


def gradient_by_ratio(name: str, advantage: float, log_ratio: float) -> float:
    """Of one token's loss by its log-prob."""
    target = torch.tensor([-1.0 + log_ratio], requires_grad=True)
    one = torch.tensor([-1.0])
    tokens = PolicyTokens(target, one, one, torch.tensor([advantage]), torch.tensor([0]), torch.tensor([False]))
    loss = load_method("policy_loss", name, "policy_loss")(tokens, config_of("grpo", name, "token-mean"))
    (gradient,) = torch.autograd.grad(loss.token_loss.sum(), target)
    return float(gradient)


@given(st.sampled_from([-2.0, -0.5, 0.5, 2.0]), st.floats(-1.5, 1.5))
@quick
def test_clips_and_weights_act_on_the_right_side(advantage: float, log_ratio: float) -> None:
    ratio, config = float(torch.tensor(log_ratio).exp()), config_of("grpo", "ppo", "token-mean")
    low, high = 1 - config.clip_ratio_low, 1 + config.clip_ratio_high
    if min(abs(ratio - bound) for bound in (low, high, config.clip_ratio_c)) < 1e-4:
        return
    clipped = ratio > high if advantage > 0 else ratio < low or ratio > config.clip_ratio_c
    assert (gradient_by_ratio("ppo", advantage, log_ratio) == 0) == clipped
    assert gradient_by_ratio("cispo", advantage, log_ratio) * advantage < 0, "no token is without gradient"
