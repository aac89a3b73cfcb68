"""The proximal policy: what PPO's clip is around, and what the correction weighs samples towards.

`recompute`, the learner's policy at the start of the step, is exact and costs a forward pass where one batch makes
several updates. `loglinear` and `linear` place it between the behaviour and the target policy by the age of each
token (AReaL, arXiv 2505.24298): free, and wrong by as much as the policy's path is not a straight line.
"""

from __future__ import annotations

import torch

SMALLEST_PROBABILITY = 1e-10


def interpolation(versions: torch.Tensor, version: int) -> torch.Tensor:
    """[N] where the proximal policy lies between behaviour (0) and target (1).

    The target is on its way to `version + 1` and the proximal policy is `version`, so that a token of version b has
    (version - b) / (version + 1 - b). 0 for tokens that are not older, or have no version (negative).
    """
    age = (version - versions).clamp_min(0).double()
    return torch.where(versions >= 0, age / (age + 1), 0.0).float()


def approximate(
    kind: str,
    logprobs: torch.Tensor,
    behaviour_logprobs: torch.Tensor,
    versions: torch.Tensor,
    version: int,
) -> torch.Tensor:
    """[N] detached proximal log-probs from the target's, the behaviour's and each token's policy version.

    `loglinear`: behaviour + alpha (target - behaviour). `linear`: log((1 - alpha) p_behaviour + alpha p_target).
    `target`: the target's own. `behaviour`: the behaviour's own.
    """
    target = logprobs.detach()
    if kind == "target":
        return target
    if kind == "behaviour":
        return behaviour_logprobs
    alpha = interpolation(versions, version)
    if kind == "loglinear":
        return behaviour_logprobs + alpha * (target - behaviour_logprobs)
    if kind == "linear":
        mixture = (1 - alpha) * behaviour_logprobs.exp() + alpha * target.exp()
        return (mixture + SMALLEST_PROBABILITY).log()
    raise ValueError(f"unknown algorithm.proximal {kind!r}")
