"""Inference engines by name.

To add one: a class with the methods of `base.InferenceEngine` in a folder of its own, its name here and in
`asyncrl/config/service_sections.py`, what it cannot do on any machine in `asyncrl/config/engine_rules.py`, and what
depends on the machine in its folder's `rules.py`: there `problems(config)` returns a line for each.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from asyncrl.errors import UserError

if TYPE_CHECKING:  # vLLM's worker process imports this package on its way to engines/vllm/worker.py
    from asyncrl.config.schema import RunConfig
    from asyncrl.models.processing import PromptProcessor
    from rollout_server.engines.base import InferenceEngine

ENGINES = {
    "hf": "rollout_server.engines.hf.engine:HFEngine",
    "vllm": "rollout_server.engines.vllm.engine:VLLMEngine",
    "sglang": "rollout_server.engines.sglang.engine:SGLangEngine",
    "scripted": "rollout_server.engines.scripted:ScriptedEngine",
}
"""Imported only when chosen: one engine's dependencies are no burden on the users of another."""


def check_rules(config: RunConfig) -> None:
    """Raises UserError for what the engine's own rules refuse on this machine."""
    rules = ENGINES[config.rollout.engine].rpartition(".")[0] + ".rules"
    if find_spec(rules) and (found := import_module(rules).problems(config)):
        raise UserError("; ".join(found))


def create_engine(config: RunConfig, processor: PromptProcessor) -> InferenceEngine:
    check_rules(config)
    module, _, name = ENGINES[config.rollout.engine].partition(":")
    return getattr(import_module(module), name)(config, processor)
