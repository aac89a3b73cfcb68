"""Settings of the methods. No torch."""

from __future__ import annotations

from pydantic import Field, field_validator, model_validator

from asyncrl.config.sections import Section
from asyncrl_plugins.distillation.rows import Hint


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
    """Likeliest tokens of the teacher that are compared one by one at each place; all others are one class."""
    teacher_weight: float = Field(default=1.0, gt=0)
    """Weight of the divergence in a token's loss."""
    reward_weight: float = Field(default=0.0, ge=0)
    """Weight of GRPO's advantage of the rewards. At 0 rewards are only shown."""


class DistillationConfig(Section):
    """Several teachers, or a teacher that sees more than the student, for `opd` and `gkd`."""

    teachers: dict[str, str] = Field(default_factory=dict)
    """Model folders by values of the column `teacher_key`, such as `{math: models/math, default: models/general}`.
    `default` teaches rows of other values; without it these are bad rows. One folder is reference.path. Empty:
    reference.path teaches all rows."""
    teacher_key: str = ""
    """Column of the data whose value chooses a row's teacher."""
    privileged: str = ""
    """Text that the teacher alone sees, behind the last user's message: `Hint: {answer}`, with columns of the row in
    braces. A row without such a column is a bad row. `answer` is that of data.answer_key, unless a column has this
    name."""
    privileged_tokens: int = Field(default=1024, gt=0)
    """Largest length of that text in tokens. A row with a longer one is a bad row."""

    @field_validator("privileged")
    @classmethod
    def _is_a_template(cls, text: str) -> str:
        Hint(text)
        return text

    @model_validator(mode="after")
    def _teachers_have_a_column(self) -> DistillationConfig:
        if bool(self.teachers) != bool(self.teacher_key):
            raise ValueError(
                f"teachers is {self.teachers} and teacher_key is {self.teacher_key!r}: the value of a column chooses "
                "a row's teacher. Set both, or leave both out"
            )
        return self
