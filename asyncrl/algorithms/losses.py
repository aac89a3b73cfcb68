"""Policy losses, the KL term, and how token losses become one number.

A policy loss is `f(tokens: PolicyTokens, config) -> PolicyLoss`: per-token losses whose gradient is the policy
gradient. It sees trainable tokens only; the correction's weight and the aggregation are applied by the learner.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from asyncrl.algorithms.corrections import total_variation_exceeded
from asyncrl.algorithms.ratios import PolicyTokens, log_ratio, ratio
from asyncrl.algorithms.registration import policy_loss
from asyncrl.config.algorithm import AlgorithmConfig

LARGEST_KL = 10.0
"""One token's estimate of the KL is cut here, so that no single one decides the step."""


@dataclass(frozen=True)
class PolicyLoss:
    token_loss: torch.Tensor
    """[N]"""
    indicators: Mapping[str, torch.Tensor]
    """[N] bool each; their means are reported under these names."""


LossFunction = Callable[[PolicyTokens, AlgorithmConfig], PolicyLoss]


@policy_loss(formula="max(-A r, -A clip(r, 1 - low, 1 + high)), at most -A c where A < 0", paper="1707.06347")
def ppo(tokens: PolicyTokens, config: AlgorithmConfig) -> PolicyLoss:
    """Clipped surrogate around the proximal policy (PPO, arXiv 1707.06347), clip-higher (DAPO, arXiv 2503.14476)
    and dual clip (arXiv 1912.09729).

    With proximal log-probs of the step's start and a behaviour correction outside, this is decoupled PPO.
    """
    r = ratio(tokens.logprobs, tokens.proximal_logprobs)
    low, high = 1 - config.clip_ratio_low, 1 + config.clip_ratio_high
    a = tokens.advantages
    surrogate = torch.maximum(-a * r, -a * r.clamp(low, high))
    bounded = torch.where(a < 0, torch.minimum(surrogate, -a * config.clip_ratio_c), surrogate)
    return PolicyLoss(
        token_loss=bounded,
        indicators={
            "clip_fraction_high": (a > 0) & (r > high),
            "clip_fraction_low": (a < 0) & (r < low),
            "clip_fraction_dual": (a < 0) & (r > config.clip_ratio_c),
        },
    )


@policy_loss(formula="-r A where |p_target - p_behaviour| is small, + tau (log r)^2", paper="2602.04879")
def dppo(tokens: PolicyTokens, config: AlgorithmConfig) -> PolicyLoss:
    """-r A without a clip, r = pi_target / pi_behaviour, where the token's probability has not moved too far (DPPO with
    total variation, arXiv 2602.04879), and kl_tau (log r)^2 at every token: where it is dropped, that term alone leads
    back. It uses no proximal policy."""
    log_r = log_ratio(tokens.logprobs, tokens.behaviour_logprobs)
    dropped = total_variation_exceeded(tokens, config.dppo.delta_low, config.dppo.delta_high)
    surrogate = torch.where(dropped, 0.0, -tokens.advantages * log_r.exp())
    return PolicyLoss(surrogate + config.dppo.kl_tau * log_r**2, {"clip_fraction_dppo": dropped})


def reference_kl(logprobs: torch.Tensor, reference_logprobs: torch.Tensor) -> torch.Tensor:
    """k3 estimate of KL(target || reference): exp(-d) + d - 1 with d = log target - log reference. [N], [N] -> [N]

    Never negative (http://joschu.net/blog/kl-approx.html).
    """
    d = logprobs - reference_logprobs
    return (ratio(reference_logprobs, logprobs) + d - 1).clamp(max=LARGEST_KL)


def token_weights(row: torch.Tensor, mode: str, *, max_response_length: int) -> torch.Tensor:
    """[N] weight of each trainable token of the whole update; `row` [N] is its trajectory.

    token-mean: 1/N. seq-mean-token-mean: 1/(rows * length of the row). seq-mean-token-sum-norm:
    1/(rows * max_response_length) (Dr. GRPO, arXiv 2503.20783). Rows without trainable tokens do not count.

    The weights are fixed before the batch is cut into micro-batches: the loss is a plain sum and does not depend on
    micro-batching, packing or the number of learners.
    """
    if mode == "token-mean":
        return torch.full(row.shape, 1.0 / max(len(row), 1))
    _, index, lengths = torch.unique(row, return_inverse=True, return_counts=True)
    rows = max(len(lengths), 1)
    if mode == "seq-mean-token-mean":
        return 1.0 / (rows * lengths[index].float())
    if mode == "seq-mean-token-sum-norm":
        return torch.full(row.shape, 1.0 / (rows * max_response_length))
    raise ValueError(f"unknown loss_agg_mode {mode!r}")
