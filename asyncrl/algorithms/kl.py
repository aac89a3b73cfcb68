"""KL(policy || reference) of each token: estimates from the sampled token, the exact sum, and KL in the reward.

With d = log policy - log reference at a token that the policy has sampled, `k1` d, `k2` d^2 / 2 and `k3`
exp(-d) + d - 1 have the KL as their mean, exactly (k1, k3) or nearly (http://joschu.net/blog/kl-approx.html). What a
loss needs is the right gradient, and there the mean gradient of k1 is 0, that of k2 the KL's, and that of k3 another
(arXiv 2506.09477). The exact sum over the vocabulary is in asyncrl/models/output_head.py, where the logits are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from asyncrl.algorithms.ratios import ratio
from asyncrl.algorithms.trajectories import Trajectories
from asyncrl.config.algorithm import KlEstimator

LARGEST_KL = 10.0
"""One token's k3 is cut here, so that no single one decides the step."""


def k1(d: torch.Tensor) -> torch.Tensor:
    return d


def k2(d: torch.Tensor) -> torch.Tensor:
    return d**2 / 2


def k3(d: torch.Tensor) -> torch.Tensor:
    """Never negative."""
    return (ratio(-d, torch.zeros_like(d)) + d - 1).clamp(max=LARGEST_KL)


OF_SAMPLED_TOKENS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "abs": torch.abs,
}


def reference_kl(
    estimator: KlEstimator,
    logprobs: torch.Tensor,
    reference_logprobs: torch.Tensor,
    behaviour_logprobs: torch.Tensor | None = None,
) -> torch.Tensor:
    """Estimate KL(policy || reference) at sampled tokens. [N] each -> [N]

    `k1+`, `k3+`: the value of k1 or k3 with the gradient of k2 (straight-through, as in verl). `k3_unbiased`: k3
    weighted by policy / behaviour, whose mean gradient is the KL's whichever policy has sampled (DeepSeek-V3.2,
    arXiv 2512.02556, section 3.1). `full` is computed elsewhere: it needs whole distributions.
    """
    d = logprobs - reference_logprobs
    if estimator == "k3_unbiased":
        assert behaviour_logprobs is not None
        return (ratio(logprobs, behaviour_logprobs) * k3(d)).clamp(max=LARGEST_KL)
    if estimator.endswith("+"):
        slope = k2(d)
        return OF_SAMPLED_TOKENS[estimator[:-1]](d).detach() + slope - slope.detach()
    return OF_SAMPLED_TOKENS[estimator](d)


def penalise(t: Trajectories, penalty: torch.Tensor) -> Trajectories:
    """Subtract a penalty [N] from the tokens' rewards, and its sum over a row from the row's score, which is the sum of
    its rewards: estimators by token and by score see the same (KL in the reward, arXiv 1909.08593)."""
    sums = torch.zeros(len(t.scores), dtype=torch.float64).index_add(0, t.row, penalty.double())
    return replace(t, scores=t.scores - sums.float(), token_rewards=t.rewards - penalty)


def mean_over_rows(tokens: torch.Tensor, row: torch.Tensor) -> tuple[float, int]:
    """Mean over rows of each row's mean, and the number of rows: every trajectory counts alike. [N], [N]"""
    _, index, counts = torch.unique(row, return_inverse=True, return_counts=True)
    sums = torch.zeros(len(counts), dtype=torch.float64).index_add(0, index, tokens.double())
    return float((sums / counts).mean()), len(counts)
