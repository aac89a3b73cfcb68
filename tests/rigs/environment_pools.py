"""Pools of one worker for tests of environments, and the results of their episodes."""

from __future__ import annotations

import asyncio
import io
import json
from typing import Any

from PIL import Image

from asyncrl.config.environment import EnvironmentConfig
from asyncrl.environments.episodes import EnvironmentWorkers, Episode
from asyncrl.environments.observation import StepResult


def run_pool(section: dict[str, Any], scenario: Any) -> Any:
    async def run() -> Any:
        pool = EnvironmentWorkers(EnvironmentConfig.model_validate({"workers": 1, **section}))
        try:
            await pool.start()
            return await asyncio.wait_for(scenario(pool), 120)
        finally:
            await pool.close()

    return asyncio.run(run())


def seen(result: StepResult) -> list[Any]:
    assert result.observation is not None
    parts = [part for message in result.observation.messages for part in message.parts]
    return [Image.open(io.BytesIO(part)).size if isinstance(part, bytes) else part for part in parts]


async def called(episode: Episode, name: str, **arguments: Any) -> StepResult:
    text = f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"
    return await episode.step(text)
