"""What a log-probability means here, on both sides of the wire.

The learner's policy is `softmax((logits + ban) / temperature)` where `ban` is minus infinity on the ids that must
never be sampled. Engine and learner both call this function, so their log-probs differ only by rounding. The engine
may cut that distribution further (truncation.py); asyncrl/config/sampling_rules.py says what this means for ratios.
"""

from __future__ import annotations

import torch


def sampling_logprobs(logits: torch.Tensor, *, temperature: torch.Tensor | float, banned: torch.Tensor) -> torch.Tensor:
    """fp32 log-probabilities of the sampling distribution.

    logits: [N, V] of any float type. temperature: a number or [N], above 0. banned: [K] token ids.
    Returns [N, V]; banned ids have -inf.
    """
    scaled = logits.float()
    if banned.numel():
        scaled = scaled.index_fill(-1, banned, float("-inf"))
    divisor = temperature[:, None] if isinstance(temperature, torch.Tensor) else temperature
    return torch.log_softmax(scaled / divisor, dim=-1)


def draw(logprobs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """[N, V], [N] random numbers in [0, 1) -> [N] tokens: the inverse of each row's cumulative distribution.

    A token of probability 0 is never drawn.
    """
    cumulative = logprobs.exp().double().cumsum(-1)
    total = cumulative[:, -1]
    below = torch.nextafter(total, torch.zeros_like(total))  # a product could round up to the total itself
    return torch.searchsorted(cumulative, torch.minimum(uniforms * total, below)[:, None], right=True).squeeze(-1)


def gather_logprobs(logprobs: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """[N, V], [N] -> [N] log-probability of each given token."""
    return logprobs.gather(-1, token_ids[:, None]).squeeze(-1)


def entropies(logprobs: torch.Tensor) -> torch.Tensor:
    """[N, V] -> [N] entropy in nats; banned ids (probability 0) contribute nothing."""
    return -(logprobs.exp() * logprobs.masked_fill(torch.isneginf(logprobs), 0.0)).sum(-1)
