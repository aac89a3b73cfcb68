"""Policy losses: per-token losses whose gradient is the policy gradient.

A loss is `f(tokens: PolicyTokens, config) -> PolicyLoss`. It sees trainable tokens only and returns one value per
token; the correction's weight and the aggregation are applied by the learner.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from asyncrl.algorithms.corrections import ratio
from asyncrl.config.schema import AlgorithmConfig


@dataclass(frozen=True)
class PolicyTokens:
    """All [N], fp32."""

    logprobs: torch.Tensor
    """Of the target policy, with gradient."""
    proximal_logprobs: torch.Tensor
    """Of the learner's policy at the start of the step, detached."""
    behaviour_logprobs: torch.Tensor
    """Of the policy that sampled the token, as the engine reported it."""
    advantages: torch.Tensor
    row: torch.Tensor
    """int64 trajectory of each token."""


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


POLICY_LOSSES: dict[str, LossFunction] = {"ppo": ppo}
