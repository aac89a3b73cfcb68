"""Waiting for vLLM's core, which may die meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from rollout_server.engines.base import EngineDied
from rollout_server.engines.vllm.vllm_api import DEAD

LOOK_EVERY_S = 1.0
T = TypeVar("T")


async def answered(llm: Any, asking: Coroutine[Any, Any, T]) -> T:
    """What the core answers to `asking`. Raises EngineDied where it has died: then vLLM would wait for ever."""
    task = asyncio.ensure_future(asking)
    try:
        while not task.done():
            await asyncio.wait({task}, timeout=LOOK_EVERY_S)
            if llm.errored and not task.done():
                raise EngineDied(DEAD)
        return task.result()
    finally:
        task.cancel()
