"""Provenance of tokens that methods are tested with."""

from __future__ import annotations

import torch

from asyncrl.algorithms.provenance import ROLES, Provenance
from protocol.messages import TokenSource, TrajectoryRole


def provenance_of(
    row: torch.Tensor, inserted: torch.Tensor | None = None, baseline: torch.Tensor | None = None
) -> Provenance[torch.Tensor]:
    """Provenance of sampled tokens but the `inserted` [N], of trained rows but the `baseline` [B]."""
    source = torch.full(row.shape, int(TokenSource.POLICY), dtype=torch.uint8)
    if inserted is not None:
        source[inserted] = int(TokenSource.INSERTED)
    rows = (int(row.max()) + 1 if len(row) else 0) if baseline is None else len(baseline)
    role = torch.full((rows,), ROLES.index(TrajectoryRole.TRAIN), dtype=torch.uint8)
    if baseline is not None:
        role[baseline] = ROLES.index(TrajectoryRole.BASELINE)
    return Provenance(source, role, torch.zeros(rows, dtype=torch.bool), row)
