"""Policy losses: per-token losses whose gradient is the policy gradient.

A loss is `f(tokens: PolicyTokens, config) -> PolicyLoss`. It sees trainable tokens only and returns one value per
token; the correction's weight and the aggregation are applied by the learner.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from asyncrl.algorithms.masks import total_variation_exceeded
from asyncrl.algorithms.ratios import log_ratio, ratio
from asyncrl.algorithms.tokens import PolicyTokens
from asyncrl.config.algorithm import AlgorithmConfig


@dataclass(frozen=True)
class PolicyLoss:
    token_loss: torch.Tensor
    """[N]"""
    indicators: Mapping[str, torch.Tensor]
    """[N] bool each; their means are reported under these names."""


LossFunction = Callable[[PolicyTokens, AlgorithmConfig], PolicyLoss]


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


def dppo(tokens: PolicyTokens, config: AlgorithmConfig) -> PolicyLoss:
    """-r A without a clip, r = pi_target / pi_behaviour, where the token's probability has not moved too far (DPPO with
    total variation, arXiv 2602.04879), and kl_tau (log r)^2. It uses no proximal policy."""
    log_r = log_ratio(tokens.logprobs, tokens.behaviour_logprobs)
    dropped = total_variation_exceeded(tokens, config.dppo.delta_low, config.dppo.delta_high)
    surrogate = torch.where(dropped, 0.0, -tokens.advantages * log_r.exp())
    return PolicyLoss(surrogate + config.dppo.kl_tau * log_r**2, {"clip_fraction_dppo": dropped})


POLICY_LOSSES: dict[str, LossFunction] = {"ppo": ppo, "dppo": dppo}
