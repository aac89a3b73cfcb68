"""What the engine has done, as vLLM's own statistics of each step tell it."""

from __future__ import annotations

import time
from typing import Any

from rollout_server.engines.base import EngineUsage


class UsageMeter:
    """Registered with vLLM as a stat logger: `record` is called after every engine step, on the event loop."""

    def __init__(self) -> None:
        self._tokens = self._running = self._waiting = 0
        self._busy_s = self._update_pause_s = 0.0
        self._busy_since = 0.0
        self._in_flight = 0
        self._paused_at: float | None = None
        self._resumed = False
        self.preemptions = 0
        """Sequences that lost their key-value cache because memory ran out; weight updates are not counted."""

    @property
    def usage(self) -> EngineUsage:
        busy_s = self._busy_s + (time.monotonic() - self._busy_since if self._in_flight else 0.0)
        return EngineUsage(self._tokens, busy_s, self._running, self._waiting, self._update_pause_s)

    def begin(self) -> None:
        """A sequence has been submitted."""
        if not self._in_flight:
            self._busy_since = time.monotonic()
        self._in_flight += 1

    def end(self) -> None:
        self._in_flight -= 1
        if not self._in_flight:
            self._busy_s += time.monotonic() - self._busy_since
            self._running = self._waiting = 0
            self._paused_at = None  # dropped before they went on

    @property
    def in_flight(self) -> int:
        return self._in_flight

    def update_begins(self) -> None:
        """Sequences stand still from here on."""
        if self._in_flight and self._paused_at is None:
            self._paused_at, self._resumed = time.monotonic(), False

    def update_ends(self) -> None:
        """They may go on; the pause they saw ends with their next token, after their caches are computed again."""
        self._resumed = True

    # --- vLLM's StatLoggerBase --------------------------------------------------------------

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        if scheduler_stats is not None:
            self._running = scheduler_stats.num_running_reqs
            self._waiting = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
        if iteration_stats is None:
            return
        self._tokens += iteration_stats.num_generation_tokens
        self.preemptions += iteration_stats.num_preempted_reqs
        if self._paused_at is not None and self._resumed and iteration_stats.num_generation_tokens:
            self._update_pause_s += time.monotonic() - self._paused_at
            self._paused_at = None

    def log(self) -> None:
        pass

    def log_engine_initialized(self) -> None:
        pass

    def record_sleep_state(self, is_awake: int, level: int) -> None:
        pass
