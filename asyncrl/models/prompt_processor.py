"""The processor of a run: that of the model folder, with what the environment adds to every prompt."""

from __future__ import annotations

from asyncrl.config.schema import RunConfig
from asyncrl.environments.shown_tools import shown_tools
from asyncrl.models.processing import PromptProcessor


def prompt_processor(config: RunConfig, *, cache_mib: int = 256) -> PromptProcessor:
    """The processor of a run's policy, whose prompts tell of the environment's tools. Raises UserError."""
    processor = PromptProcessor(config.model, cache_mib=cache_mib)
    processor.show_tools(shown_tools(config.environment))
    return processor
