"""Off-policy correction: weights that turn samples of the behaviour policy into samples of the proximal one.

Weights are detached and multiply the token losses; they never enter a denominator.
"""

from __future__ import annotations

import torch

from asyncrl.config.schema import CorrectionConfig

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped here before `exp`, so that no weight is infinite."""


def ratio(numerator_logprobs: torch.Tensor, denominator_logprobs: torch.Tensor) -> torch.Tensor:
    """exp(numerator - denominator), the log clamped to +-20. [N], [N] -> [N]"""
    return (numerator_logprobs - denominator_logprobs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def correction_weights(
    proximal_logprobs: torch.Tensor, behaviour_logprobs: torch.Tensor, config: CorrectionConfig
) -> torch.Tensor:
    """[N] detached weight of each token.

    `token_tis`: min(pi_proximal / pi_behaviour, cap), truncated importance sampling per token as in decoupled PPO
    (arXiv 2505.24298). `none`: 1.
    """
    if config.kind == "none":
        return torch.ones_like(behaviour_logprobs)
    return ratio(proximal_logprobs, behaviour_logprobs).clamp_max(config.cap).detach()
