"""Names of vLLM that this engine uses, imported when it starts (that takes seconds), and waiting for vLLM's core."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from asyncrl.errors import UserError
from rollout_server.engines.base import EngineDied

DEAD = "vLLM's engine process has died; what it said last is in the server's log"
CHECK_EVERY_S = 1.0
T = TypeVar("T")


class VllmApi:
    """Classes and functions of the installed vLLM. Creating it raises ImportError or OSError."""

    def __init__(self) -> None:
        from vllm.config.weight_transfer import WeightTransferConfig  # pyright: ignore[reportMissingImports]
        from vllm.distributed.weight_transfer.base import (  # pyright: ignore[reportMissingImports]
            WeightTransferInitRequest,
            WeightTransferUpdateRequest,
        )
        from vllm.engine.arg_utils import AsyncEngineArgs  # pyright: ignore[reportMissingImports]
        from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]
        from vllm.renderers.inputs.preprocess import parse_model_prompt  # pyright: ignore[reportMissingImports]
        from vllm.sampling_params import RequestOutputKind, SamplingParams  # pyright: ignore[reportMissingImports]
        from vllm.v1.attention.backends.cpu_attn import (  # pyright: ignore[reportMissingImports]
            CPUAttentionBackend,
        )
        from vllm.v1.engine.async_llm import AsyncLLM  # pyright: ignore[reportMissingImports]
        from vllm.v1.engine.exceptions import EngineDeadError  # pyright: ignore[reportMissingImports]
        from vllm.version import __version__  # pyright: ignore[reportMissingImports, reportPrivateImportUsage]

        self.version: str = __version__

        class AsyncEngine(AsyncLLM):
            """Shut down by `close` alone: at the end of the process the destructor's own modules are gone."""

            def __del__(self) -> None:
                pass

        self.AsyncEngine, self.AsyncEngineArgs, self.EngineDeadError = AsyncEngine, AsyncEngineArgs, EngineDeadError
        self.SamplingParams, self.RequestOutputKind = SamplingParams, RequestOutputKind
        self.LoRARequest = LoRARequest
        self.parse_model_prompt = parse_model_prompt
        self.WeightTransferConfig = WeightTransferConfig
        self.WeightTransferInitRequest = WeightTransferInitRequest
        self.WeightTransferUpdateRequest = WeightTransferUpdateRequest
        self.cpu_head_sizes: list[int] = CPUAttentionBackend.get_supported_head_sizes()

    @contextmanager
    def engine_death_translated(self) -> Iterator[None]:
        """Raises EngineDied for vLLM's own exception."""
        try:
            yield
        except self.EngineDeadError as error:
            raise EngineDied(DEAD) from error


def import_vllm() -> VllmApi:
    """Raises UserError where it is installed but broken."""
    try:
        return VllmApi()
    except (ImportError, OSError) as error:
        raise UserError(
            f"vLLM is installed but cannot be imported: {type(error).__name__}: {error}. A library of another build "
            "stands beside it; make the environment anew: WITH_VLLM=1 bash scripts/install.sh"
        ) from error


async def await_or_engine_death(llm: Any, call: Coroutine[Any, Any, T]) -> T:
    """Result of a call to vLLM's core. Raises EngineDied if the core dies meanwhile: vLLM would wait for ever."""
    task = asyncio.ensure_future(call)
    try:
        while not task.done():
            await asyncio.wait({task}, timeout=CHECK_EVERY_S)
            if llm.errored and not task.done():
                raise EngineDied(DEAD)
        return task.result()
    finally:
        task.cancel()
