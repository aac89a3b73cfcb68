"""Selections: which trained tokens of a whole batch leave the loss, decided before its first update.

A selection is `f(trajectories, credit, config) -> [N] bool`, true where a token is dropped. Like a mask of the
correction it takes a token out of the policy loss, entropy bonus and KL, and leaves every denominator as it is.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from asyncrl.algorithms.registration import selection
from asyncrl.algorithms.trajectories import Credit, Trajectories
from asyncrl.config.algorithm import AlgorithmConfig, SelectionConfig

Selection = Callable[[Trajectories, Credit, SelectionConfig], torch.Tensor]


@selection(
    formula="fewest tokens without which mean (log proximal - log behaviour)^2 < threshold",
    paper="2510.01161",
    needs=("proximal",),
)
def m2po(t: Trajectories, credit: Credit, config: SelectionConfig) -> torch.Tensor:
    """The fewest tokens, largest squared log-ratio of proximal to behaviour policy first, without which the mean
    squared log-ratio is below the threshold (M2PO, arXiv 2510.01161). One token always stays."""
    assert t.proximal_logprobs is not None
    squares = (t.proximal_logprobs - t.behaviour_logprobs).double() ** 2
    ascending, order = torch.sort(squares, stable=True)
    means = ascending.cumsum(0) / torch.arange(1, len(squares) + 1)
    kept = max(int((means < config.threshold).sum()), 1)  # the running mean of ascending values never falls
    dropped = torch.zeros_like(squares, dtype=torch.bool)
    dropped[order[kept:]] = True
    return dropped


def token_covariance(t: Trajectories, credit: Credit) -> torch.Tensor:
    """(A - mean A) (log p - mean log p) over the batch's tokens: how much a token's update costs of the entropy
    (arXiv 2505.22617, eq. 8). [N]"""
    assert t.proximal_logprobs is not None
    if not len(credit.advantages):
        return credit.advantages
    return (credit.advantages - credit.advantages.mean()) * (t.proximal_logprobs - t.proximal_logprobs.mean())


def marked_by_loss(t: Trajectories, credit: Credit, config: AlgorithmConfig) -> torch.Tensor | None:
    """Tokens that `clip_cov` or `kl_cov` treats apart, [N] bool; None for other losses.

    `kl_cov` takes those of the highest covariance, `clip_cov` random ones between its bounds, drawn by the
    trajectories' seed.
    """
    if config.policy_loss not in ("clip_cov", "kl_cov"):
        return None
    covariance, settings = token_covariance(t, credit), config.covariance
    number = max(int(settings.fraction * len(covariance)), 1)
    marked = torch.zeros(len(covariance), dtype=torch.bool)
    if config.policy_loss == "kl_cov":
        marked[covariance.argsort(descending=True, stable=True)[:number]] = True
        return marked
    candidates = ((covariance > settings.lower) & (covariance < settings.upper)).nonzero()[:, 0]
    order = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(t.seed))
    marked[candidates[order[:number]]] = True
    return marked
