"""Meter of the engine's work, from vLLM's own statistics of each step."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from rollout_server.engines.base import EngineUsage


class UsageMeter:
    """Registered with vLLM as a stat logger: `record` is called after every engine step, on the event loop."""

    def __init__(self) -> None:
        self._tokens = self._running = 0
        self._busy_s = self._update_pause_s = self._kv_cache_ratio = 0.0
        self._busy_since = 0.0
        self._paused_at: float | None = None
        self._resumed = False
        self.in_work: set[str] = set()
        """Ids of the requests that vLLM has, or is about to get."""
        self.idle = asyncio.Event()
        """Set while vLLM has no request."""
        self.idle.set()
        self.sleep_bytes = 0

    @property
    def usage(self) -> EngineUsage:
        busy_s = self._busy_s + (time.monotonic() - self._busy_since if self.in_work else 0.0)
        return EngineUsage(
            self._tokens,
            busy_s,
            self._running,
            self._update_pause_s,
            self.sleep_bytes,
            self._kv_cache_ratio,
        )

    def begin(self, number: str) -> None:
        """Note a submitted sequence."""
        if not self.in_work:
            self._busy_since = time.monotonic()
            self.idle.clear()
        self.in_work.add(number)

    def end(self, number: str) -> None:
        self.in_work.remove(number)
        if not self.in_work:
            self._busy_s += time.monotonic() - self._busy_since
            self._running = 0
            self._paused_at = None  # dropped before they went on
            self.idle.set()

    def update_begins(self) -> None:
        """Note that sequences stand still from here on."""
        if self.in_work and self._paused_at is None:
            self._paused_at, self._resumed = time.monotonic(), False

    def update_ends(self) -> None:
        """Sequences may go on; their pause ends with their next token, after their caches are computed again."""
        self._resumed = True

    # --- vLLM's StatLoggerBase --------------------------------------------------------------

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        if scheduler_stats is not None and self.in_work:  # a step may be reported after its requests were dropped
            self._running = scheduler_stats.num_running_reqs
        if scheduler_stats is not None:
            self._kv_cache_ratio = scheduler_stats.kv_cache_usage
        if iteration_stats is None:
            return
        self._tokens += iteration_stats.num_generation_tokens
        if self._paused_at is not None and self._resumed and iteration_stats.num_generation_tokens:
            self._update_pause_s += time.monotonic() - self._paused_at
            self._paused_at = None

    def log(self) -> None:
        pass

    def log_engine_initialized(self) -> None:
        pass

    def record_sleep_state(self, is_awake: int, level: int) -> None:
        pass
