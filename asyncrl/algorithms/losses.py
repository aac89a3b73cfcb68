"""Policy losses, the critic's loss, and how token losses become one number.

A policy loss is `f(tokens: PolicyTokens, config) -> PolicyLoss`: per-token losses whose gradient is the policy
gradient. It sees trainable tokens only; the correction's weight and the aggregation are applied by the learner.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from asyncrl.algorithms.ratios import PolicyTokens, ratio, row_mean
from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.installed_methods import method_of

LARGEST_LOG_RATIO = 10.0
"""Bound of a trajectory's log-ratio plus a token's own in gspo."""


@dataclass(frozen=True)
class PolicyLoss:
    token_loss: torch.Tensor
    """[N]"""
    indicators: Mapping[str, torch.Tensor]
    """[N] bool each; their means over sampled tokens are reported under these names."""
    supervised_weight: torch.Tensor | None = None
    """[N] detached weight of -log p at inserted tokens, for the report; other tokens' values mean nothing."""


LossFunction = Callable[[PolicyTokens, AlgorithmConfig], PolicyLoss]


def ppo(tokens: PolicyTokens, config: AlgorithmConfig) -> PolicyLoss:
    """Clipped surrogate around the proximal policy (PPO), clip-higher (DAPO, arXiv 2503.14476) and dual clip
    (arXiv 1912.09729).

    With proximal log-probs of the step's start and a behaviour correction outside, this is decoupled PPO.
    """
    return clipped(tokens.advantages, ratio(tokens.logprobs, tokens.proximal_logprobs), config)


def clipped(a: torch.Tensor, r: torch.Tensor, config: AlgorithmConfig) -> PolicyLoss:
    """PPO's surrogate for advantages and ratios. [N], [N]"""
    low, high = 1 - config.clip_ratio_low, 1 + config.clip_ratio_high
    surrogate = torch.maximum(-a * r, -a * r.clamp(low, high))
    return PolicyLoss(
        token_loss=torch.where(a < 0, torch.minimum(surrogate, -a * config.clip_ratio_c), surrogate),
        indicators={
            "clip_fraction_high": (a > 0) & (r > high),
            "clip_fraction_low": (a < 0) & (r < low),
            "clip_fraction_dual": (a < 0) & (r > config.clip_ratio_c),
        },
    )


def gspo(tokens: PolicyTokens, config: AlgorithmConfig) -> PolicyLoss:
    """PPO's clip around the geometric mean of a trajectory's ratios, whose gradient every token shares (GSPO, in its
    token form: the value is the trajectory's, the gradient the token's own)."""
    of_row = row_mean(tokens.logprobs.detach() - tokens.proximal_logprobs, tokens.row)
    own = tokens.logprobs - tokens.logprobs.detach()
    return clipped(tokens.advantages, (of_row + own).clamp(max=LARGEST_LOG_RATIO).exp(), config)


def gpg(tokens: PolicyTokens, config: AlgorithmConfig) -> PolicyLoss:
    """Policy gradient without ratio or clip (GPG; REINFORCE). The correction's weight is outside."""
    return PolicyLoss(-tokens.advantages * tokens.logprobs, {})


def cispo(tokens: PolicyTokens, config: AlgorithmConfig) -> PolicyLoss:
    """Policy gradient weighted by the clipped ratio: no token loses its gradient (CISPO). A low of 1 is no bound."""
    r = ratio(tokens.logprobs.detach(), tokens.proximal_logprobs)
    low, high = 1 - config.clip_ratio_low, 1 + config.clip_ratio_high
    outside = {"clip_fraction_high": r > high, "clip_fraction_low": r < low}
    return PolicyLoss(-r.clamp(low, high) * tokens.advantages * tokens.logprobs, outside)


@dataclass(frozen=True)
class ValueLoss:
    token_loss: torch.Tensor
    """[n]"""
    clipped: torch.Tensor
    """[n] bool: the clip decided."""


def value_loss(values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, clip_range: float) -> ValueLoss:
    """Half the squared error of a critic (PPO, arXiv 1707.06347), the larger of plain and clipped.

    Values that have left [old - clip_range, old + clip_range] on the way to their return get no gradient. [n] each; a
    clip_range of 0 clips nothing.
    """
    plain = (values - returns) ** 2
    if not clip_range:
        return ValueLoss(0.5 * plain, torch.zeros_like(plain, dtype=torch.bool))
    near = (old_values + (values - old_values).clamp(-clip_range, clip_range) - returns) ** 2
    return ValueLoss(0.5 * torch.maximum(plain, near), near > plain)


def token_weights(
    row: torch.Tensor, mode: str, *, max_response_length: int, group: torch.Tensor | None = None
) -> torch.Tensor:
    """[N] weight of each trainable token of the whole update; `row` [N] is its trajectory, `group` [N] its group.

    token-mean: 1/N. seq-mean-token-mean: 1/(rows * length of the row). seq-mean-token-sum: 1/rows.
    seq-mean-token-sum-norm: 1/(rows * max_response_length) (Dr. GRPO, arXiv 2503.20783). prompt-mean:
    1/(groups * tokens of the group). Rows without trainable tokens do not count.

    The weights are fixed before the batch is cut into micro-batches: the loss is a plain sum and does not depend on
    micro-batching, packing or the number of learners.
    """
    if mode == "token-mean":
        return torch.full(row.shape, 1.0 / max(len(row), 1))
    if mode == "prompt-mean":
        assert group is not None
        row, mode = group, "seq-mean-token-mean"  # the same, of groups
    lengths = torch.bincount(row)
    rows = max(int((lengths > 0).sum()), 1)
    if mode == "seq-mean-token-mean":
        return 1.0 / (rows * lengths[row].float())
    if mode == "seq-mean-token-sum":
        return torch.full(row.shape, 1.0 / rows)
    if mode == "seq-mean-token-sum-norm":
        return torch.full(row.shape, 1.0 / (rows * max_response_length))
    raise ValueError(f"unknown loss_agg_mode {mode!r}")


@dataclass(frozen=True)
class UpdateWeights:
    """Weights of an update's tokens with its denominators in them. [N] each."""

    loss: torch.Tensor
    """Weights of the token losses, and of all that is added to them but the entropy bonus."""
    entropy: torch.Tensor
    """Weights of the entropies, 0 at inserted tokens."""

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> UpdateWeights:
        return UpdateWeights(function(self.loss), function(self.entropy))


def update_weights(
    row: torch.Tensor, group: torch.Tensor, inserted: torch.Tensor, config: AlgorithmConfig, *, max_response_length: int
) -> UpdateWeights:
    """Weights of the trained tokens of a whole update. Loss: `loss_agg_mode` of what was sampled, and for the others
    (`inserted` [N] bool) the mean over themselves, unless the policy loss shares one denominator between them. Entropy:
    `entropy_agg_mode` of what was sampled."""
    loss = method_of("policy_loss", config.policy_loss)
    apart = torch.zeros_like(inserted) if loss and loss.shares_denominator else inserted

    def spread(mode: str, of: torch.Tensor, elsewhere: float) -> torch.Tensor:
        weights = torch.full(row.shape, elsewhere)
        weights[of] = token_weights(row[of], mode, group=group[of], max_response_length=max_response_length)
        return weights

    return UpdateWeights(
        spread(config.loss_agg_mode, ~apart, 1.0 / max(int(apart.sum()), 1)),
        spread(config.entropy_agg_mode, ~inserted, 0.0),
    )
