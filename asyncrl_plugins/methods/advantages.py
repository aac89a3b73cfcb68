"""Advantage estimators that compare the trajectories of a group, beside the core's.

A score of NaN marks a row that could not be scored: it is left out of every statistic.
"""

from __future__ import annotations

from math import comb, sqrt

import torch

from asyncrl.algorithms.advantages import EPSILON, NO_SPREAD, has_spread, over_std, with_spread
from asyncrl.algorithms.corrections import importance_weights
from asyncrl.algorithms.token_advantages import returns_to_come, whiten
from asyncrl.algorithms.trajectories import Credit, Trajectories, group_statistics
from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.errors import BadStateError
from asyncrl_plugins.methods.settings import GpgConfig, PassKConfig


def reinforce_plus_plus_baseline(t: Trajectories, config: AlgorithmConfig) -> Credit:
    """Score against its group's mean, whitened over the tokens of the batch (REINFORCE++-baseline)."""
    return Credit(whiten(group_statistics(t.scores, t.group).centred[t.row]))


def opo(t: Trajectories, config: AlgorithmConfig) -> Credit:
    """Score minus the length-weighted mean of its group, the baseline of least variance on-policy (OPO)."""
    g = group_statistics(t.scores, t.group, weights=t.lengths)
    return t.share(with_spread(group_statistics(t.scores, t.group), g.centred))


def gpg(t: Trajectories, config: AlgorithmConfig) -> Credit:
    """Score against its group's mean, scaled up for the rows of groups without spread, which have no gradient (GPG).

    `algorithm.gpg.valid` says which rows count as having one: the paper's are those of groups with spread. RLLaVA and
    verl count rows with s != 0, which scales nothing where every row earns something.
    """
    g = group_statistics(t.scores, t.group)
    scored = ~t.scores.isnan()
    valid = has_spread(g) if config.settings_of(GpgConfig).valid == "spread" else scored & (t.scores != 0)
    scale = scored.sum() / valid.sum().clamp_min(1)
    return t.share(with_spread(g, scale * over_std(g, config)))


def lite_ppo(t: Trajectories, config: AlgorithmConfig) -> Credit:
    """Score against its group's mean, over the standard deviation of all scores of the batch (Lite PPO)."""
    g = group_statistics(t.scores, t.group)
    of_batch = group_statistics(t.scores, torch.zeros_like(t.group))
    return t.share(with_spread(g, g.centred / (of_batch.std + EPSILON)))


def maxrl(t: Trajectories, config: AlgorithmConfig) -> Credit:
    """Score against its group's mean, over that mean: rare successes weigh more (MaxRL). No score may be negative."""
    if (t.scores < 0).any():
        raise BadStateError(
            "algorithm.adv_estimator maxrl divides by the mean score, and a score is "
            f"{float(t.scores.nan_to_num().min()):g}. Give a reward that is never negative (no penalty in "
            "reward.functions), or choose another estimator"
        )
    g = group_statistics(t.scores, t.group)
    return t.share(with_spread(g, torch.where(g.mean > 0, g.centred / g.mean.clamp_min(EPSILON), 0.0)))


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
    return t.share(with_spread(g, advantages))


def passk_training(t: Trajectories, config: AlgorithmConfig) -> Credit:
    """Analytic advantage of Pass@k training, k = `algorithm.passk_training.k`. A row is right if its score is
    `algorithm.passk_training.success_score` or above; a group of fewer than k rows gets 0."""
    settings = config.settings_of(PassKConfig)
    advantages = torch.zeros_like(t.scores)
    for rows in _rows_of_groups(t):
        right = t.scores[rows] >= settings.success_score
        n, wrong, k = len(rows), int((~right).sum()), settings.k
        if k > n:
            continue
        mean = 1 - comb(wrong, k) / comb(n, k)
        sigma = sqrt(mean * (1 - mean))
        if sigma < NO_SPREAD:
            continue
        of_wrong = (1 - mean - comb(wrong - 1, k - 1) / comb(n - 1, k - 1)) / sigma
        advantages[rows] = torch.where(right, (1 - mean) / sigma, of_wrong)
    return t.share(advantages)


def _rows_of_groups(t: Trajectories) -> list[torch.Tensor]:
    """Scored rows of each group."""
    scored = ~t.scores.isnan()
    return [(scored & (t.group == group)).nonzero()[:, 0] for group in t.group.unique()]


def optimal_token_baseline(t: Trajectories, config: AlgorithmConfig) -> Credit:
    """Return to come minus the group's baseline of least variance at the same place (as in verl). A token counts in it
    with the square of its weight under `algorithm.correction.kind`.

    A place that only the group's longest row has gets no baseline of its own making: its advantage is the return. A
    group of one row gets 0.
    """
    assert t.proximal_logprobs is not None
    assert t.squared_probabilities is not None
    differences = t.proximal_logprobs - t.behaviour_logprobs
    if t.provenance is not None:
        differences = torch.where(t.provenance.is_inserted, 0.0, differences)
    of_token = 1 - 2 * t.proximal_logprobs.exp() + t.squared_probabilities
    of_token = of_token.clamp_min(0) * importance_weights(differences, t.row, config.correction) ** 2
    weight = t.padded(of_token).cumsum(1)
    to_come = t.padded(returns_to_come(t, gamma=1.0))
    there = torch.arange(weight.shape[1]) < t.lengths[:, None]
    weight = weight * there
    groups = torch.unique(t.group, return_inverse=True)[1]
    zeros = torch.zeros(int(groups.max()) + 1 if len(groups) else 0, weight.shape[1])
    total = zeros.index_add(0, groups, weight)
    count = zeros.index_add(0, groups, there.float())
    baseline = torch.where(count > 1, zeros.index_add(0, groups, to_come * weight) / (total + 1e-8), 0.0)
    advantages = torch.where(has_others(t)[:, None], to_come - baseline[groups], 0.0)
    return Credit(t.flat(advantages), returns=t.flat(to_come))


def has_others(t: Trajectories) -> torch.Tensor:
    """[B] bool: rows in whose group at least two have trained tokens."""
    groups = torch.unique(t.group, return_inverse=True)[1]
    count = torch.zeros(len(groups), dtype=torch.long).index_add(0, groups, (t.lengths > 0).long())
    return count[groups] > 1
