"""Settings of the prompt sources: sections that exist only where their source is chosen."""

from __future__ import annotations

from pydantic import Field

from asyncrl.config.sections import Section


class GresoConfig(Section):
    """`algorithm.greso` (arXiv 2506.02177): rows whose latest groups had no spread are passed over."""

    component: str = ""
    """Component of the reward that visits are decided by, right being 1; empty means the accuracy."""
    explore: float = Field(default=0.5, gt=0, lt=1)
    """Probability at the start of visiting a row whose last group had no spread."""
    easy_score: float = 0.98
    """Mean score from which a group without spread is easy, and below which it is hard."""
    target_easy: float = Field(default=1 / 12, ge=0, le=1)
    """Share of easy groups below which more such rows are visited, and else fewer."""
    target_hard: float = Field(default=1 / 6, ge=0, le=1)
    """Share of hard groups below which more such rows are visited, and else fewer."""


class PassRateConfig(Section):
    """`algorithm.pass_rate`: rows whose pass rate is near a target are preferred."""

    component: str = ""
    """Component of the reward that visits are decided by, right being 1; empty means the accuracy."""
    target: float = Field(default=0.5, ge=0, le=1)
    """Mean score of the rows that are visited most."""
    floor: float = Field(default=0.1, gt=0, le=1)
    """Probability of visiting the rows that are farthest from the target."""
    memory: float = Field(default=0.5, ge=0, lt=1)
    """Weight of a row's earlier groups in its pass rate, beside its latest."""
