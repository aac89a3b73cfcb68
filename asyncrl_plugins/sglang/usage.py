"""Meter of the engine's work, by its requests: over HTTP SGLang reports tokens of finished ones alone."""

from __future__ import annotations

import asyncio
import time

from rollout_server.engines.base import EngineUsage


class UsageMeter:
    def __init__(self) -> None:
        self._tokens = 0
        self._busy_s = self._update_pause_s = self._busy_since = 0.0
        self._paused_at: float | None = None
        self._in_work: set[str] = set()
        self.idle = asyncio.Event()
        """Set while SGLang has no request."""
        self.idle.set()
        self.sleep_bytes = 0

    @property
    def usage(self) -> EngineUsage:
        """The share of the key-value cache in use is among SGLang's own metrics (`sglang:token_usage`)."""
        busy_s = self._busy_s + (time.monotonic() - self._busy_since if self._in_work else 0.0)
        return EngineUsage(self._tokens, busy_s, len(self._in_work), self._update_pause_s, self.sleep_bytes)

    def begin(self, rid: str) -> None:
        """Note a submitted sequence."""
        if not self._in_work:
            self._busy_since = time.monotonic()
            self.idle.clear()
        self._in_work.add(rid)

    def end(self, rid: str) -> None:
        self._in_work.remove(rid)
        if not self._in_work:
            self._busy_s += time.monotonic() - self._busy_since
            self.idle.set()

    def sampled(self, tokens: int) -> None:
        """Note the tokens of a sequence that has finished."""
        self._tokens += tokens

    def update_begins(self) -> None:
        """Note that sequences stand still from here on."""
        self._paused_at = time.monotonic() if self._in_work else None

    def update_ends(self) -> None:
        if self._paused_at is not None:
            self._update_pause_s += time.monotonic() - self._paused_at
            self._paused_at = None
