"""Settings of the methods. No torch."""

from __future__ import annotations

from pydantic import Field

from asyncrl.config.sections import Section


class OpdConfig(Section):
    """`adv_estimator: opd`: a teacher (`reference.path`) scores the student's own samples."""

    teacher_weight: float = Field(default=1.0, gt=0)
    """Weight of log teacher - log student at a token."""
    reward_weight: float = Field(default=0.0, ge=0)
    """Weight of GRPO's advantage of the rewards, beside the teacher's. At 0 rewards are only shown."""
    largest: float = Field(default=10.0, gt=0)
    """Largest distance of teacher and student at a token, in nats, that is taken: no single token decides a step."""


class GkdConfig(Section):
    """`adv_estimator: gkd`: whole distributions of teacher and student are compared on the student's own samples."""

    beta: float = Field(default=0.5, ge=0, le=1)
    """Divergence: 0 is the forward KL(teacher || student), 1 the reverse KL(student || teacher), and between them the
    generalised Jensen-Shannon divergence."""
    top_k: int = Field(default=64, gt=0)
    """Tokens of the teacher that are compared one by one at each place; all others are one class."""
    teacher_weight: float = Field(default=1.0, gt=0)
    """Weight of the divergence in a token's loss."""
    reward_weight: float = Field(default=0.0, ge=0)
    """Weight of GRPO's advantage of the rewards. At 0 rewards are only shown."""


class DistillationConfig(Section):
    """Teachers of `opd` and `gkd`. `gkd` has this section anyway."""
