"""How many training groups are where: at every instant it adds up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class LedgerCounts:
    """Training groups."""

    issued: int
    waiting: int
    in_flight: int
    buffered: int
    trained: int
    dropped: Mapping[str, int]
    """By reason."""

    @property
    def residual(self) -> int:
        """0, always; anything else is a lost or doubled group."""
        known = self.waiting + self.in_flight + self.buffered + self.trained + sum(self.dropped.values())
        return self.issued - known
