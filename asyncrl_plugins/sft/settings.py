"""Section `sft`: settings of `asyncrl sft`."""

from __future__ import annotations

from pydantic import Field

from asyncrl.config.schema import RunConfig
from asyncrl.config.sections import Section
from asyncrl.config.service_sections import OptimConfig
from asyncrl.plugins import Part, installed_evaluator


class SftOptimConfig(OptimConfig):
    lr: float = Field(default=1e-5, gt=0)
    """Peak learning rate of AdamW, which steps float32 master weights whatever model.dtype is."""


class SftConfig(Section):
    """`asyncrl sft`: supervised warm start on `data.target_key`."""

    steps: int = Field(default=0, ge=0)
    """Optimiser steps; 0 means one epoch."""
    rows_per_step: int = Field(default=64, gt=0)
    """Rows per optimiser step."""
    save_freq: int = Field(default=0, ge=0)
    """Checkpoint every so many steps and at the end, the newest trainer.save_limit of them kept; 0 means only where a
    signal stops the run."""
    evaluate_every: int = Field(default=0, ge=0)
    """Score the rows of data.val_files after this many steps, at the end and (evaluation.before_training) the start:
    loss of their targets, and where there is a reward greedy or sampled completions as `asyncrl eval` scores them. The
    best model so far is in run_dir/best. 0 means never."""
    optim: SftOptimConfig = SftOptimConfig()


def settings_of(config: RunConfig) -> SftConfig:
    """The section `sft`, with defaults where it is not given."""
    return (config.model_extra or {}).get("sft") or SftConfig()


def scores_completions(config: RunConfig) -> bool:
    """Whether evaluations of the run score completions; of several turns they do not."""
    return settings_of(config).evaluate_every > 0 and bool(config.reward.functions) and not config.environment.is_used


def evaluator() -> Part:
    """The installed evaluator. Raises UserError where there is none."""
    return installed_evaluator("sft.evaluate_every with reward.functions (reward.functions=[] gives losses alone)")
