"""A real vLLM engine for many tests, started once."""

from __future__ import annotations

import importlib.util
import multiprocessing
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.schema import RunConfig
from asyncrl_plugins.vllm.engine import VLLMEngine
from asyncrl_plugins.vllm.start import engine_environment
from tests.conftest import small_config
from tests.rigs.engine_rig import Rig

NEEDS_VLLM = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: WITH_VLLM=1 bash scripts/install.sh"
    ),
]
MAX_PIXELS = 900
"""Of an image: it is reduced to four tokens at most."""


class VLLMRig(Rig):
    def make_engine(self) -> Any:
        fork_cores(self.config)
        return VLLMEngine(self.config, self.processor)


def vllm_config(
    model: Path, data: Path, run: Path, /, *, max_response_length: int = 384, **sections: dict[str, Any]
) -> RunConfig:
    """Configuration of an engine for tests; `sections` add to what each section has here."""
    rollout = {"engine": "vllm", "max_concurrent_sequences": 32}
    lengths = {"max_response_length": max_response_length}
    return small_config(model, data, run, data=lengths, rollout=rollout, **sections)


def fork_cores(config: RunConfig) -> None:
    """Let vLLM's cores be forks of the process that starts one: to import vLLM again takes 20 s of processor time.

    They are spawned in a run of `asyncrl train` in test_vllm_end_to_end.py.
    """
    with engine_environment(config, cuda=False):
        utils: Any = import_module("vllm.v1.engine.utils")
    utils.get_mp_context = partial(multiprocessing.get_context, "fork")
