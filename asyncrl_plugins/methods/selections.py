"""Selections beside the core's: `f(trajectories, credit, config) -> [N] bool`."""

from __future__ import annotations

import torch

from asyncrl.algorithms.trajectories import Credit, Trajectories
from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl_plugins.methods.settings import CppoConfig, RandomCovarianceConfig, TopCovarianceConfig


def cppo(t: Trajectories, credit: Credit, config: AlgorithmConfig) -> torch.Tensor:
    """The share `algorithm.cppo.prune` of each group's trajectories, smallest |advantage| first: they cost no forward
    pass, and micro-batches are filled with what stays (CPPO, arXiv 2503.22342). One of each group always stays."""
    sums = torch.zeros(len(t.scores), dtype=torch.float64).index_add(0, t.row, credit.advantages.double())
    size = (sums / t.lengths.clamp_min(1)).abs().float()
    rows = (t.lengths > 0).nonzero()[:, 0]
    rows = rows[size[rows].argsort(descending=True, stable=True)]
    rows = rows[t.group[rows].argsort(stable=True)]  # group by group, largest first
    _, group, count = torch.unique(t.group[rows], return_inverse=True, return_counts=True)
    place = torch.arange(len(rows)) - (count.cumsum(0) - count)[group]
    kept = (count * (1 - config.settings_of(CppoConfig).prune) + 1e-6).floor().clamp_min(1)
    pruned = torch.zeros(len(t.scores), dtype=torch.bool)
    pruned[rows[place >= kept[group]]] = True
    return pruned[t.row]


def token_covariance(t: Trajectories, credit: Credit) -> torch.Tensor:
    """(A - mean A) (log p - mean log p) over the batch's tokens: how much a token's update costs of the entropy
    (arXiv 2505.22617, eq. 8). [N]"""
    assert t.proximal_logprobs is not None
    if not len(credit.advantages):
        return credit.advantages
    return (credit.advantages - credit.advantages.mean()) * (t.proximal_logprobs - t.proximal_logprobs.mean())


def top_covariance(t: Trajectories, credit: Credit, config: AlgorithmConfig) -> torch.Tensor:
    """The share `algorithm.top_covariance.fraction` of tokens whose update costs most of the entropy: what `kl_cov`
    penalises (arXiv 2505.22617)."""
    covariance = token_covariance(t, credit)
    chosen = torch.zeros(len(covariance), dtype=torch.bool)
    number = config.settings_of(TopCovarianceConfig).number_of(len(covariance))
    chosen[covariance.argsort(descending=True, stable=True)[:number]] = True
    return chosen


def random_covariance(t: Trajectories, credit: Credit, config: AlgorithmConfig) -> torch.Tensor:
    """The share `algorithm.random_covariance.fraction` of tokens at random, of those whose covariance is within bounds:
    what `clip_cov` gives no gradient (arXiv 2505.22617). The trajectories' seed draws them."""
    covariance, settings = token_covariance(t, credit), config.settings_of(RandomCovarianceConfig)
    candidates = ((covariance > settings.lower) & (covariance < settings.upper)).nonzero()[:, 0]
    order = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(t.seed))
    chosen = torch.zeros(len(covariance), dtype=torch.bool)
    chosen[candidates[order[: settings.number_of(len(covariance))]]] = True
    return chosen
