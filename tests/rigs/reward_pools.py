"""A reward scorer with its real processes, for one scenario."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import psutil

from asyncrl.config.sections import RewardConfig
from asyncrl.rewards.scorer import RewardScorer


def run_pool(config: RewardConfig, scenario: Callable[[RewardScorer], Awaitable[Any]]) -> Any:
    """Run the scenario, and make sure that the closed pool leaves no process behind."""

    async def run() -> Any:
        others = child_processes()
        pool = RewardScorer(config)
        await pool.start()
        try:
            return await asyncio.wait_for(scenario(pool), 60)
        finally:
            family = child_processes() - others
            await pool.close()
            assert not [p for p in family if p.is_running()]

    return asyncio.run(run())


def child_processes() -> set[psutil.Process]:
    """Children of this process; earlier tests may have left Python's own resource tracker."""
    return set(psutil.Process().children(recursive=True))
