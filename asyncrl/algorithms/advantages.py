"""Advantage estimators that compare the trajectories of a group: one advantage for all tokens of a trajectory.

An estimator is `f(trajectories, config) -> Credit`. A score of NaN marks a row that could not be scored: it is left out
of every statistic. Groups of one scored row, and groups without spread, get exactly 0.
"""

from __future__ import annotations

from collections.abc import Callable
from math import comb, sqrt

import torch

from asyncrl.algorithms.registration import advantage
from asyncrl.algorithms.trajectories import Credit, GroupStatistics, Trajectories, group_statistics
from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.errors import BadStateError

AdvantageEstimator = Callable[[Trajectories, AlgorithmConfig], Credit]

NO_SPREAD = 1e-6
"""Standard deviations below this are rounding: 0.1 + 0.1 + 0.1 has a mean that is not 0.1."""
EPSILON = 1e-6


@advantage(formula="(s - mean_group) / (std_group + 1e-6)", paper="2402.03300", compares_rows=True)
def grpo(t: Trajectories, config: AlgorithmConfig) -> Credit:
    """Score against its group's mean, over the group's standard deviation (GRPO, section 4.1.2).

    With `norm_adv_by_std=False`: s - mean (Dr. GRPO, arXiv 2503.20783).
    """
    return t.share(normalised(t.scores, t.group, config))


@advantage(
    formula="s - mean_group",
    paper="2503.20783",
    defaults={"norm_adv_by_std": False, "loss_agg_mode": "seq-mean-token-sum-norm"},
    compares_rows=True,
)
def dr_grpo(t: Trajectories, config: AlgorithmConfig) -> Credit:
    """Score against its group's mean (Dr. GRPO): no standard deviation, and a constant in place of the length."""
    g = group_statistics(t.scores, t.group)
    return t.share(_with_spread(g, g.centred))


@advantage(formula="s - mean of the others in the group", paper="2402.14740", compares_rows=True)
def rloo(t: Trajectories, config: AlgorithmConfig) -> Credit:
    """Score minus the mean of the others in the group: n/(n-1) (s - mean) (RLOO)."""
    g = group_statistics(t.scores, t.group)
    return t.share(_with_spread(g, g.centred * g.count / (g.count - 1).clamp_min(1)))


@advantage(formula="s - sum(l s) / sum(l) over the group, l the length", paper="2505.23585", compares_rows=True)
def opo(t: Trajectories, config: AlgorithmConfig) -> Credit:
    """Score minus the length-weighted mean of its group, the baseline of least variance on-policy (OPO)."""
    g = group_statistics(t.scores, t.group, weights=t.lengths)
    return t.share(_with_spread(group_statistics(t.scores, t.group), g.centred))


@advantage(
    formula="B / (rows of groups with spread) * (s - mean_group)",
    paper="2504.02546",
    defaults={"norm_adv_by_std": False, "policy_loss": "gpg"},
    plain_scores=True,
    compares_rows=True,
)
def gpg(t: Trajectories, config: AlgorithmConfig) -> Credit:
    """Score against its group's mean, scaled up for the rows of groups without spread, which have no gradient (GPG).

    `algorithm.gpg_valid` says which rows count as having one: the paper's are those of groups with spread. RLLaVA and
    verl count rows with s != 0, which scales nothing where every row earns something.
    """
    g = group_statistics(t.scores, t.group)
    scored = ~t.scores.isnan()
    valid = _has_spread(g) if config.gpg_valid == "spread" else scored & (t.scores != 0)
    scale = scored.sum() / valid.sum().clamp_min(1)
    return t.share(_with_spread(g, scale * _over_std(g, config)))


@advantage(formula="(s - mean_group) / (std_batch + 1e-6)", paper="2508.08221", compares_rows=True)
def lite_ppo(t: Trajectories, config: AlgorithmConfig) -> Credit:
    """Score against its group's mean, over the standard deviation of all scores of the batch (Lite PPO)."""
    g = group_statistics(t.scores, t.group)
    of_batch = group_statistics(t.scores, torch.zeros_like(t.group))
    return t.share(_with_spread(g, g.centred / (of_batch.std + EPSILON)))


@advantage(
    formula="(s - mean_group) / mean_group, 0 where the mean is not positive",
    paper="2602.02710",
    plain_scores=True,
    compares_rows=True,
)
def maxrl(t: Trajectories, config: AlgorithmConfig) -> Credit:
    """Score against its group's mean, over that mean: rare successes weigh more (MaxRL). No score may be negative."""
    if (t.scores < 0).any():
        raise BadStateError(
            "algorithm.adv_estimator maxrl divides by the mean score, and a score is "
            f"{float(t.scores.nan_to_num().min()):g}. Give a reward that is never negative (no penalty in "
            "reward.functions), or choose another estimator"
        )
    g = group_statistics(t.scores, t.group)
    return t.share(_with_spread(g, torch.where(g.mean > 0, g.centred / g.mean.clamp_min(EPSILON), 0.0)))


@advantage(
    formula="(best - second) / (std_group + 1e-6) for the best row, else 0", paper="2503.19595", compares_rows=True
)
def grpo_passk(t: Trajectories, config: AlgorithmConfig) -> Credit:
    """Gap between the best row of a group and the second, for the best alone (Pass@k policy optimisation).

    Ties for the best get 0.
    """
    g = group_statistics(t.scores, t.group)
    advantages = torch.zeros_like(t.scores)
    for rows in _rows_of_groups(t):
        if len(rows) > 1:
            best, second = t.scores[rows].topk(2).values
            winner = rows[t.scores[rows].argmax()]
            advantages[winner] = (best - second) / (g.std[winner] + EPSILON if config.norm_adv_by_std else 1.0)
    return t.share(_with_spread(g, advantages))


@advantage(
    formula="(1 - R) / sigma for right rows, R = 1 - C(wrong, k) / C(n, k)",
    paper="2508.10751",
    plain_scores=True,
    compares_rows=True,
)
def passk_training(t: Trajectories, config: AlgorithmConfig) -> Credit:
    """Analytic advantage of Pass@k training, k = `algorithm.pass_k`. A row is right if its score is
    `algorithm.success_score` or above; a group of fewer than k rows gets 0."""
    advantages = torch.zeros_like(t.scores)
    for rows in _rows_of_groups(t):
        right = t.scores[rows] >= config.success_score
        n, wrong, k = len(rows), int((~right).sum()), config.pass_k
        if k > n:
            continue
        mean = 1 - comb(wrong, k) / comb(n, k)
        sigma = sqrt(mean * (1 - mean))
        if sigma < NO_SPREAD:
            continue
        of_wrong = (1 - mean - comb(wrong - 1, k - 1) / comb(n - 1, k - 1)) / sigma
        advantages[rows] = torch.where(right, (1 - mean) / sigma, of_wrong)
    return t.share(advantages)


@advantage(
    formula="z over the batch of sum_k w_k (s_k - mean_group) / (std_group + 1e-4)",
    paper="2601.05242",
    plain_scores=True,
    compares_rows=True,
)
def gdpo(t: Trajectories, config: AlgorithmConfig) -> Credit:
    """Each reward component normalised in its group before they are added up, so that rows of different components and
    the same sum stay different (GDPO)."""
    total = torch.zeros_like(t.scores)
    for name, component in t.components.items():
        g = group_statistics(component, t.group)
        total += t.component_weights.get(name, 1.0) * _with_spread(g, g.centred / (g.std + 1e-4))
    of_batch = group_statistics(torch.where(t.scores.isnan(), torch.nan, total), torch.zeros_like(t.group))
    return t.share(_with_spread(of_batch, of_batch.centred / (of_batch.std + 1e-4)))


def normalised(scores: torch.Tensor, group: torch.Tensor, config: AlgorithmConfig) -> torch.Tensor:
    """Scores against their group's mean, over its standard deviation with `norm_adv_by_std`; 0 where it has one score
    or no spread. [B], [B] -> [B]"""
    g = group_statistics(scores, group)
    return _with_spread(g, _over_std(g, config))


def _over_std(g: GroupStatistics, config: AlgorithmConfig) -> torch.Tensor:
    """Centred scores, over the group's standard deviation where the configuration says so."""
    return g.centred / (g.std + EPSILON) if config.norm_adv_by_std else g.centred


def _with_spread(g: GroupStatistics, advantages: torch.Tensor) -> torch.Tensor:
    """The advantages where the group has spread, else 0."""
    return torch.where(_has_spread(g), advantages, 0.0)


def _has_spread(g: GroupStatistics) -> torch.Tensor:
    """[B] bool: scored rows whose group has more than one, and they differ."""
    return (g.count > 1) & (g.std >= NO_SPREAD)


def _rows_of_groups(t: Trajectories) -> list[torch.Tensor]:
    """Scored rows of each group."""
    scored = ~t.scores.isnan()
    return [(scored & (t.group == group)).nonzero()[:, 0] for group in t.group.unique()]
