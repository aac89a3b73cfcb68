"""Inference engines by name (asyncrl/config/parts.py).

A new one is a class with the methods of `base.InferenceEngine`, and a description in a plug-in. Its modules are
imported only where it is chosen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncrl.config.parts import ROLLOUT_ENGINES
from asyncrl.errors import UserError
from asyncrl.plugins import implementation

if TYPE_CHECKING:  # an engine's own processes import this package, too
    from asyncrl.config.schema import RunConfig
    from asyncrl.processing.processor import PromptProcessor
    from rollout_server.engines.base import InferenceEngine


def check_rules(config: RunConfig) -> None:
    """Raises UserError for what the engine's own rules refuse on this machine."""
    rules = ROLLOUT_ENGINES[config.rollout.engine].machine_problems
    if rules and (found := implementation(rules)(config)):
        raise UserError("; ".join(found))


def create_engine(config: RunConfig, processor: PromptProcessor) -> InferenceEngine:
    check_rules(config)
    return implementation(ROLLOUT_ENGINES[config.rollout.engine].implementation)(config, processor)
