"""Definition of log-probabilities that engine and learner share.

The learner's policy is `softmax((logits + ban) / temperature)` where `ban` is minus infinity on the ids that must
never be sampled. Engine and learner both call these functions, so their log-probs differ only by rounding. The engine
may truncate that distribution (top-k, top-p, min-p); asyncrl/config/sampling_rules.py says what this means for ratios.
The order of truncation is vLLM's: min-p, then top-k, then top-p, each on what the one before it kept.
"""

from __future__ import annotations

import torch

CACHED_VALUES = 2**16
"""fp32 values that a core's cache holds a few times over. Such pieces take less memory than is planned, too."""


def sampling_logprobs(logits: torch.Tensor, *, temperature: torch.Tensor | float, banned: torch.Tensor) -> torch.Tensor:
    """fp32 log-probabilities of the sampling distribution.

    logits: [N, V] of any float type. temperature: a number or [N], above 0. banned: [K] token ids.
    Returns [N, V]; banned ids have -inf. Holds no more than two tensors of that size beside the caller's.
    """
    scaled = logits.float()
    del logits
    if banned.numel():
        scaled = scaled.index_fill(-1, banned, float("-inf"))
    if isinstance(temperature, torch.Tensor):
        scaled = scaled / temperature[:, None]
    elif temperature != 1:
        scaled = scaled / temperature
    return torch.log_softmax(scaled, dim=-1)


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
    if logprobs.device.type == "cpu" and not (logprobs.requires_grad and torch.is_grad_enabled()):
        rows = logprobs.split(max(1, CACHED_VALUES // logprobs.shape[-1]))
        return torch.cat([_entropies(row) for row in rows])  # the same bits in a third of the time
    return _entropies(logprobs)


def _entropies(logprobs: torch.Tensor) -> torch.Tensor:
    return -(logprobs.exp() * logprobs.clamp_min(torch.finfo(logprobs.dtype).min)).sum(-1)  # 0 * inf is not 0


def exact_kl(logprobs: torch.Tensor, other_logprobs: torch.Tensor) -> torch.Tensor:
    """[N, V], [N, V] -> [N] KL(first || other) in nats; ids that both ban contribute nothing."""
    smallest = torch.finfo(logprobs.dtype).min  # 0 * inf is not 0
    return (logprobs.exp() * (logprobs.clamp_min(smallest) - other_logprobs.clamp_min(smallest))).sum(-1)


def log_kept_mass(
    logprobs: torch.Tensor, token_ids: torch.Tensor, *, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """[N, V], [N] -> [N] log of the probability that truncation keeps; the sampled `token_ids` count as kept.

    An engine samples `logprob - log_kept_mass`. Rounding may put a token that it kept beyond the bound here.
    """
    kept = ~torch.isneginf(truncated_logprobs(logprobs, top_k=top_k, top_p=top_p, min_p=min_p))
    kept.scatter_(-1, token_ids[:, None], True)
    return torch.logsumexp(logprobs.masked_fill(~kept, float("-inf")), dim=-1)


def truncated_logprobs(
    logprobs: torch.Tensor, *, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Log-probs of the renormalised kept tokens; -inf on the others.

    logprobs: [N, V] fp32 of the sampling distribution before truncation. top_k: [N], 0 is off. top_p: [N] in
    (0, 1], 1 is off: the most probable tokens until their mass reaches it. min_p: [N] in [0, 1], 0 is off: tokens
    at least this fraction of the most probable one's probability. Of equally probable tokens the lower id goes first.
    """
    ordered, ids = logprobs.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logprobs.shape[-1], device=logprobs.device)
    kept = ordered >= ordered[:, :1] + min_p.log()[:, None]
    kept &= (rank < top_k[:, None]) | (top_k[:, None] == 0)
    mass = torch.where(kept, ordered.exp(), 0.0).double()
    before = mass.cumsum(-1) - mass
    kept &= (before < top_p[:, None] * mass.sum(-1, keepdim=True)) | (top_p[:, None] >= 1)
    kept = torch.zeros_like(kept).scatter(-1, ids, kept)
    return torch.log_softmax(logprobs.masked_fill(~kept, float("-inf")), dim=-1)
