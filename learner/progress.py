"""Where a run is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Progress:
    """One step publishes one version, so the two run in parallel from their starts."""

    total_steps: int
    step: int = 0
    version: int = 0

    @property
    def is_last(self) -> bool:
        return self.step >= self.total_steps
