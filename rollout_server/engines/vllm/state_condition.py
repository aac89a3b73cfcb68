"""Waiting until the engine's state is another one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from asyncrl.errors import BadStateError


class StateCondition:
    def __init__(self) -> None:
        self._changed = asyncio.Condition()

    async def tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def until(self, condition: Callable[[], bool], deadline_s: float, what: str) -> None:
        """Raises BadStateError after `deadline_s`, which is learner.wait_timeout_s."""
        try:
            async with asyncio.timeout(deadline_s), self._changed:
                await self._changed.wait_for(condition)
        except TimeoutError:
            raise BadStateError(f"waited {deadline_s:g} s (learner.wait_timeout_s) {what}") from None
