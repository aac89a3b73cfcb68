"""What losses and corrections see of a micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PolicyTokens:
    """Trainable tokens, whole trajectories. All [N], fp32."""

    logprobs: torch.Tensor
    """Of the target policy, with gradient."""
    proximal_logprobs: torch.Tensor
    """Of the policy that the clip is around, detached (see `proximal`)."""
    behaviour_logprobs: torch.Tensor
    """Of the policy that sampled the token, as the engine reported it."""
    advantages: torch.Tensor
    row: torch.Tensor
    """int64 trajectory of each token."""
