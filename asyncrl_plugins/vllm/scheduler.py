"""Scheduler of vLLM's core for its model runner V1, whose preempted requests are computed again with their images."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # pyright: ignore[reportMissingImports]
from vllm.v1.core.sched.scheduler import Scheduler  # pyright: ignore[reportMissingImports]


def scheduler(**arguments: Any) -> Any:
    """A scheduler as vLLM would make it, whose new requests bring the workers every image and video.

    vLLM keeps back those that lie in a cached prefix (https://github.com/vllm-project/vllm/pull/52041). Model runner V1
    is sent nothing again when a request is preempted, as by new weights, and its prefix is gone: the core would die.
    """
    base: Any = AsyncScheduler if arguments["vllm_config"].scheduler_config.async_scheduling else Scheduler

    class WholeRequests(base):
        def schedule(self, *given: Any, **named: Any) -> Any:
            step = super().schedule(*given, **named)
            for new in step.scheduled_new_reqs:
                new.mm_features = self.requests[new.req_id].mm_features
            return step

    return WholeRequests(**arguments)
