"""From the configuration to a running vLLM."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, cast

from asyncrl.config.schema import RunConfig
from asyncrl.errors import UserError
from asyncrl.models.loading import model_folder
from protocol.messages import AdapterSpec
from rollout_server.engines.vllm.adapter import slot_arguments
from rollout_server.engines.vllm.names import BACKEND
from rollout_server.engines.vllm.settings import (
    check_heads,
    engine_arguments,
    engine_environment,
)
from rollout_server.engines.vllm.vllm_api import VllmApi, import_vllm

logger = logging.getLogger(__name__)


def start_vllm(
    config: RunConfig, adapter: AdapterSpec | None, banned: Sequence[int], statistics: Any, *, cuda: bool
) -> tuple[Any, VllmApi]:
    """An `AsyncLLM`, and vLLM's names; many seconds. `statistics` is a stat logger of vLLM's.

    Raises UserError for what vLLM does not know or cannot run.
    """
    from transformers import AutoConfig

    hf_config = AutoConfig.from_pretrained(model_folder(config.model), trust_remote_code=config.model.trust_remote_code)
    text_config = hf_config.get_text_config()
    with engine_environment(config, cuda=cuda):
        vllm = import_vllm()
        if not cuda:
            check_heads(text_config, vllm.cpu_head_sizes)
        arguments = engine_arguments(config, cuda=cuda, text_config=text_config, banned=list(banned))
        if adapter is not None:
            arguments |= slot_arguments(adapter)
        logger.info("starting vLLM %s with %s", vllm.version, arguments)
        transfer = None if adapter else vllm.WeightTransferConfig(backend=BACKEND)
        try:  # a failure within vLLM's own processes is no ValueError here
            llm = vllm.AsyncEngine.from_engine_args(
                vllm.AsyncEngineArgs(**arguments, weight_transfer_config=transfer),
                stat_loggers=cast(Any, [lambda _config, _index=0: statistics]),
            )
        except ValueError as problem:
            raise UserError(f"vLLM refuses its arguments, such as rollout.engine_args: {problem}") from problem
    return llm, vllm
