"""Top-k, top-p and min-p: sampling from a part of the vocabulary, with the log-probs of exactly that distribution.

The order is vLLM's: min-p, then top-k, then top-p, each on what the one before it kept.
"""

from __future__ import annotations

import torch


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
