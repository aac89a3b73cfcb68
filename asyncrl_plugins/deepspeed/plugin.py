"""Description of the deepspeed engine: settings, configurations that it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from asyncrl.config.parts import LearnerEngine
from asyncrl.config.run_sections import RunSections
from asyncrl.config.sections import Section

ZERO_BUCKET = 50_000_000
"""Elements of one collective of DeepSpeed's gradients or weights. Its own number is ten times that: 2 GB in fp32."""
ZERO_LIVE = 1_000_000_000
"""Elements of weights that DeepSpeed's stage 3 leaves gathered for their next use (its own number)."""


class DeepSpeedConfig(Section):
    """ZeRO (`learner.engine: deepspeed`, arXiv 1910.02054)."""

    zero_stage: Literal[1, 2, 3] = 2
    """State divided over num_processes: 1 AdamW's with its masters, 2 gradients, too, 3 the weights, too."""


def problems(config: RunSections) -> Iterator[str]:
    """Name each setting that DeepSpeed cannot fulfil, with its fix."""
    if config.trainer.mode == "sync":
        yield (
            "learner.engine is deepspeed, but trainer.mode is sync, and DeepSpeed's buffers would stay on the device. "
            "Set learner.engine=fsdp2 or trainer.mode=async"
        )
    if config.model.lora.modules_to_save:
        yield (
            "model.lora.modules_to_save trains weights of model.dtype beside float32 adapters, and what DeepSpeed "
            "trains has one dtype. Set learner.engine=fsdp2, or model.lora.modules_to_save=[]"
        )
    if config.model.dtype == "float16":
        yield (
            "model.dtype is float16, whose loss scale learner.engine=deepspeed does not have. Set model.dtype=bfloat16 "
            "or learner.engine=fsdp2"
        )


ENGINE = LearnerEngine(
    implementation="asyncrl_plugins.deepspeed.placement:zero",
    section=DeepSpeedConfig,
    problems=problems,
    packages=("deepspeed",),
    extra="learner-deepspeed",
    memory="asyncrl_plugins.deepspeed.memory:MEMORY",
)
