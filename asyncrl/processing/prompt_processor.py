"""The processor of a run: that of the model folder, with what the environment adds to every prompt."""

from __future__ import annotations

from typing import Any

from asyncrl.config.environment import EnvironmentConfig
from asyncrl.config.sections import ModelConfig
from asyncrl.environments.image_rule import ImageRule
from asyncrl.environments.shown_tools import shown_tools
from asyncrl.processing.image_grids import PatchGrids
from asyncrl.processing.processor import PromptProcessor


def prompt_processor(model: ModelConfig, environment: EnvironmentConfig, *, cache_mib: int = 256) -> PromptProcessor:
    """The processor of a run's policy, whose prompts tell of the environment's tools. Raises UserError."""
    processor = PromptProcessor(model, cache_mib=cache_mib)
    processor.show_tools(shown_tools(environment))
    return processor


def image_rule(processor: PromptProcessor) -> ImageRule:
    """The sizes of images that the policy's processor takes as they are."""
    part: Any = getattr(processor.processor, "image_processor", None)
    if PatchGrids.of(processor.processor) is None:
        return ImageRule()
    return ImageRule(part.patch_size * part.merge_size, part.size["longest_edge"], part.size["shortest_edge"])
