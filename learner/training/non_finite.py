"""A loss or a gradient that is not finite, and where it comes from: the words of a BadStateError."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from asyncrl.errors import BadStateError
from learner.training.batch import Batch

MOST_NAMED = 3
"""Rows and parameters named in one message."""


class NotFiniteError(BadStateError):
    """A step stops: one of its numbers cannot be trained on."""

    def __init__(self, number: str, message: str):
        """`number`: loss or grad_norm, as in metrics.jsonl."""
        super().__init__(message)
        self.number = number


def not_finite_tokens(values: Mapping[str, torch.Tensor], row: torch.Tensor, batch: Batch) -> str:
    """The first of the [N] values, in the order in which they are computed, that is not finite, and its rows."""
    for name, value in values.items():
        bad = ~torch.isfinite(value.detach()).cpu()
        if bad.any():
            rows = sorted(set(row.cpu()[bad].tolist()))
            return f"{name} is not finite at {int(bad.sum())} of {len(bad)} tokens, in {name_rows(rows, batch)}"
    return f"every token's value is finite, but their sum is not, over {name_rows(row.unique().tolist(), batch)}"


def name_rows(rows: Iterable[int], batch: Batch) -> str:
    """Rows of the batch as the user knows them: the prompt's row id and which of its completions."""
    names: list[str] = []
    for row in rows:
        group = int(batch.groups[row])
        first = int(torch.searchsorted(batch.groups, group))
        names.append(f"{batch.received[group].ticket.prompt.row_id} (completion {row - first})")
    return _first(names, "rows")


def name_parameters(names: list[str]) -> str:
    return _first(names, "parameters")


def _first(names: list[str], what: str) -> str:
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {more} more {what}" if more > 0 else "")
