"""The learner: staleness, training engine, optimiser."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from asyncrl.config.section import Section

OnStale = Literal["wait", "drop", "mask"]


class OptimConfig(Section):
    lr: float = Field(default=1e-6, gt=0)
    """Peak learning rate of AdamW."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of AdamW's two moment estimates."""
    weight_decay: float = Field(default=0.01, ge=0)
    """Decoupled weight decay of AdamW."""
    lr_warmup_steps: int = Field(default=0, ge=0)
    """Optimiser steps of linear warm-up from 0."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after warm-up."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """Fraction of lr at which linear and cosine end."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Clip the global gradient norm to this."""


class AdaptiveStalenessConfig(Section):
    """Rules by which `learner.max_staleness: auto` moves the bound, from each step's raw token ratios."""

    min: int = Field(default=1, ge=0)
    """Smallest bound, and the one to start from."""
    max: int = Field(default=8, gt=0)
    """Largest bound."""
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
        for low, high in (("min", "max"), ("ess_low", "ess_high"), ("kl_low", "kl_high")):
            if not getattr(self, low) < getattr(self, high):
                raise ValueError(
                    f"learner.adaptive_staleness.{low} ({getattr(self, low)}) must be below "
                    f"learner.adaptive_staleness.{high} ({getattr(self, high)})"
                )
        return self


class LearnerConfig(Section):
    max_staleness: int | Literal["auto"] = 2
    """Oldest policy version a trained token may come from, in versions behind the learner's. 0 = exactly on-policy;
    auto = moved by learner.adaptive_staleness."""
    adaptive_staleness: AdaptiveStalenessConfig = AdaptiveStalenessConfig()
    on_stale: OnStale = "wait"
    """When a group is not there before it gets older than max_staleness: `wait` for it, go on and `drop` it (its
    prompt is issued again), or go on and `mask` its old tokens. The last two favour short completions (length_bias)."""
    engine: Literal["torch"] = "torch"
    """Training engine."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda`, `cuda:1`, ..."""
    cpu_threads: int = Field(default=0, ge=0)
    """Torch threads; 0 means half of the cores when the servers share the machine, and all of them in sync mode."""
    gradient_checkpointing: bool = False
    """Keep each layer's input only and compute the layer again in the backward pass: less memory, a third more time."""
    optim: OptimConfig = OptimConfig()
    wait_timeout_s: float = Field(default=600.0, gt=0)
    """Longest wait for the groups of one step before the run stops with a reason."""

    @field_validator("max_staleness", mode="before")
    @classmethod
    def _bound_or_auto(cls, value: Any) -> Any:
        if value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
            return value
        raise ValueError(f"learner.max_staleness is {value!r}: expected a whole number >= 0, or auto")
