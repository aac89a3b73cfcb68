"""Row of the adaptive staleness bound, with its settings: an entry of the entry point group `asyncrl.methods`. No
torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pydantic import Field, model_validator

from asyncrl.config.method import Method, MethodSet
from asyncrl.config.sections import Section

if TYPE_CHECKING:
    from asyncrl.config.schema import RunConfig


class AdaptiveStalenessConfig(Section):
    """`algorithm.adaptive_staleness`: the bound moves within [min, learner.max_staleness] by each step's raw token
    ratios."""

    min: int = Field(default=1, ge=0)
    """Smallest bound, and the one to start from."""
    ess_low: float = Field(default=0.9, gt=0, lt=1)
    """Effective sample size below which a step speaks for a smaller bound."""
    ess_high: float = Field(default=0.97, gt=0, lt=1)
    """Effective sample size above which, with a mismatch KL below kl_low, a step speaks for a larger bound."""
    kl_low: float = Field(default=0.01, gt=0)
    """Mismatch KL in nats per token, see ess_high."""
    kl_high: float = Field(default=0.04, gt=0)
    """Mismatch KL (k3, nats per token) above which a step speaks for a smaller bound."""
    patience: int = Field(default=3, gt=0)
    """Steps in a row that must agree before the bound moves by one."""

    @model_validator(mode="after")
    def _ordered(self) -> AdaptiveStalenessConfig:
        for low, high in (("ess_low", "ess_high"), ("kl_low", "kl_high")):
            if not getattr(self, low) < getattr(self, high):
                raise ValueError(
                    f"algorithm.adaptive_staleness.{low} ({getattr(self, low)}) must be below "
                    f"algorithm.adaptive_staleness.{high} ({getattr(self, high)})"
                )
        return self


def problems(config: RunConfig) -> Iterator[str]:
    smallest, largest = config.algorithm.settings_of(AdaptiveStalenessConfig).min, config.learner.max_staleness
    if smallest >= largest:
        yield (
            f"algorithm.adaptive_staleness.min is {smallest} and learner.max_staleness, the largest bound, {largest}. "
            "Set learner.max_staleness=8, or leave algorithm.adaptive_staleness out"
        )
    if config.rollout.truncates:
        yield (
            "algorithm.adaptive_staleness is chosen, and completions are sampled from a part of the distribution "
            "(rollout.top_p, top_k or min_p), so that effective sample size and KL do not measure staleness. Leave one "
            "of them out"
        )


METHODS = MethodSet(
    staleness_controllers={
        "adaptive_staleness": Method(
            "asyncrl_plugins.adaptive_staleness.controller:AdaptiveStaleness",
            formula="+1 after `patience` steps with ess > ess_high and kl < kl_low, -1 with ess < ess_low or "
            "kl > kl_high",
            settings=AdaptiveStalenessConfig,
            problems=problems,
        )
    }
)
