"""Description of the deepspeed engine: settings, configurations that it refuses, facts about its checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

from asyncrl.config.learner_engines import LearnerEngine
from asyncrl.config.run_sections import RunSections
from asyncrl.config.sections import Section
from asyncrl.config.service_sections import LearnerConfig

CheckpointFormat = Literal["portable", "deepspeed"]
ZERO_BUCKET = 50_000_000
"""Elements of one collective of DeepSpeed's gradients or weights. Its own number is ten times that: 2 GB in fp32."""
ZERO_LIVE = 1_000_000_000
"""Elements of weights that DeepSpeed's stage 3 leaves gathered for their next use (its own number)."""


class DeepSpeedConfig(Section):
    """ZeRO (`learner.engine: deepspeed`, arXiv 1910.02054)."""

    zero_stage: Literal[1, 2, 3] = 2
    """State divided over num_processes: 1 AdamW's with its masters, 2 gradients, too, 3 the weights, too."""
    checkpoint_format: CheckpointFormat = "portable"
    """Masters and moments in a checkpoint: `portable`, which any engine on any number of ranks continues from, or
    `deepspeed`, DeepSpeed's own files for its tools, from which the same zero_stage on as many ranks goes on. Those are
    not written while training goes on (trainer.save_async=false)."""


def problems(config: RunSections) -> Iterator[str]:
    """Name each setting that DeepSpeed cannot fulfil, with its fix."""
    if config.learner.settings_of(DeepSpeedConfig).checkpoint_format == "deepspeed" and config.trainer.save_async:
        yield (
            "learner.deepspeed.checkpoint_format is deepspeed, whose files are written by all ranks together, and "
            "trainer.save_async is true. Set trainer.save_async=false or learner.deepspeed.checkpoint_format=portable"
        )
    if config.trainer.mode == "sync":
        yield (
            "learner.engine is deepspeed, but trainer.mode is sync, and DeepSpeed's buffers would stay on the device. "
            "Set learner.engine=fsdp2 or trainer.mode=async"
        )
    if config.model.dtype == "float16":
        yield (
            "model.dtype is float16, whose loss scale learner.engine=deepspeed does not have. Set model.dtype=bfloat16 "
            "or learner.engine=fsdp2"
        )


def own_placement(learner: LearnerConfig) -> Mapping[str, object]:
    return placement(learner.settings_of(DeepSpeedConfig).zero_stage, learner.num_processes)


def placement(stage: int, ranks: int) -> dict[str, object]:
    """Settings by key that files in DeepSpeed's own format are of."""
    return {
        "learner.engine": "deepspeed",
        "learner.deepspeed.zero_stage": stage,
        "learner.num_processes": ranks,
    }


def saved_weights(learner: LearnerConfig) -> int:
    return 2 if learner.settings_of(DeepSpeedConfig).checkpoint_format == "deepspeed" else 1


ENGINE = LearnerEngine(
    implementation="asyncrl_plugins.deepspeed.placement:zero",
    section=DeepSpeedConfig,
    problems=problems,
    packages=("deepspeed",),
    extra="learner-deepspeed",
    memory="asyncrl_plugins.deepspeed.memory:MEMORY",
    own_placement=own_placement,
    saved_weights=saved_weights,
)
