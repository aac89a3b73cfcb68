"""How token losses become one number: a constant weight per token, from counts over the whole batch.

Because the weights are fixed before the batch is cut into micro-batches, the loss is their plain sum and does
not depend on micro-batching, packing or the number of learners.
"""

from __future__ import annotations

import torch


def token_weights(row: torch.Tensor, mode: str, *, max_response_length: int) -> torch.Tensor:
    """[N] weight of each trainable token of the whole batch; `row` [N] is its trajectory.

    token-mean: 1/N. seq-mean-token-mean: 1/(rows * length of the row). seq-mean-token-sum-norm:
    1/(rows * max_response_length) (Dr. GRPO, arXiv 2503.20783). Rows without trainable tokens do not count.
    """
    if mode == "token-mean":
        return torch.full(row.shape, 1.0 / max(len(row), 1))
    _, index, lengths = torch.unique(row, return_inverse=True, return_counts=True)
    rows = max(len(lengths), 1)
    if mode == "seq-mean-token-mean":
        return 1.0 / (rows * lengths[index].float())
    if mode == "seq-mean-token-sum-norm":
        return torch.full(row.shape, 1.0 / (rows * max_response_length))
    raise ValueError(f"unknown loss_agg_mode {mode!r}")
