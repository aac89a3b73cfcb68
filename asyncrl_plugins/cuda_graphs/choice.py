"""The choice that an engine makes at its start: decode steps as CUDA graphs, or the reason why not."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from asyncrl.config.parts import cache_columns
from asyncrl.config.schema import RunConfig
from asyncrl.config.sections import ModelConfig
from asyncrl.models.small_copy import family_of
from asyncrl.models.token_trace import Recorder
from asyncrl_plugins.cuda_graphs.batch import GraphedBatch
from asyncrl_plugins.cuda_graphs.graphs import Capture, CudaCapture, StepGraphs
from asyncrl_plugins.cuda_graphs.plugin import EAGER
from rollout_server.engines.hf.decode_batch import DecodeBatch
from rollout_server.engines.hf.decode_check import decoding_problem
from rollout_server.engines.hf.grouped_attention import GROUPED_ATTENTION

logger = logging.getLogger(__name__)

CAPTURES: dict[str, Callable[[torch.device], Capture]] = {"cuda": CudaCapture}
"""Makers of what captures a step, by device type."""
CHECKED = 64, 256
"""Sequences and columns, more than the check of a family has: rows without a sequence are computed, too."""


def graphed_batches(
    config: RunConfig,
    model: Any,
    banned_token_ids: Sequence[int],
    device: torch.device,
    recorders: Mapping[str, Recorder],
) -> Callable[[], DecodeBatch] | None:
    """Maker of batches whose steps are captured; None, with the reason in the log, where they are not. It makes the
    core's batches once a capture has failed."""
    capture = CAPTURES.get(device.type)
    if capture is None:
        return None
    if reason := _reason_against(config, model, recorders):
        logger.info("the hf engine decodes without CUDA graphs: %s", reason)
        return None
    logger.info("the hf engine decodes with CUDA graphs; rollout.engine_args.%s=true is without", EAGER)
    most = most_slots(config)
    graphs = StepGraphs(partial(capture, device))

    def make() -> DecodeBatch:
        if graphs.failure:
            return DecodeBatch(model, banned_token_ids, device, recorders)
        return GraphedBatch(model, banned_token_ids, device, most=most, graphs=graphs)

    return make


def most_slots(config: RunConfig) -> tuple[int, int]:
    """Sequences and columns of the largest cache that the memory plan counts with."""
    tokens = config.data.max_prompt_length + config.longest_completion
    return config.rollout.max_concurrent_sequences, cache_columns(tokens)


def _reason_against(config: RunConfig, model: Any, recorders: Mapping[str, Recorder]) -> str:
    if config.rollout.engine_args.get(EAGER):
        return f"rollout.engine_args.{EAGER} is true"
    if recorders:
        return f"a replayed step records no traces of tokens ({', '.join(recorders)})"
    attention = model.config.get_text_config(decoder=True)._attn_implementation
    if attention != GROUPED_ATTENTION:
        return f"the model's attention is {attention}, and steps were captured with torch's alone"
    return family_problem(config.model)


def family_problem(config: ModelConfig) -> str:
    """How steps over whole blocks of memory sample wrongly from a small copy of the family, which has been sampled
    rightly without; empty where they do not."""
    return decoding_problem(family_of(config), groups_queries=True, kind=uncaptured)


def uncaptured(model: Any, banned_token_ids: Sequence[int], device: torch.device) -> DecodeBatch:
    """Batch of the steps as they would be captured."""
    return GraphedBatch(model, banned_token_ids, device, most=CHECKED, graphs=StepGraphs(None))
