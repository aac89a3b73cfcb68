"""How far the target policy is from the reference policy, as a term of the loss."""

from __future__ import annotations

import torch

from asyncrl.algorithms.ratios import ratio

LARGEST = 10.0
"""One token's estimate is cut here, so that no single one decides the step."""


def reference_kl(logprobs: torch.Tensor, reference_logprobs: torch.Tensor) -> torch.Tensor:
    """k3 estimate of KL(target || reference): exp(-d) + d - 1 with d = log target - log reference. [N], [N] -> [N]

    Never negative (http://joschu.net/blog/kl-approx.html).
    """
    d = logprobs - reference_logprobs
    return (ratio(reference_logprobs, logprobs) + d - 1).clamp(max=LARGEST)
