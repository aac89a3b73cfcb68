"""A real SGLang server for many tests, started once."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncrl_plugins.sglang.engine import SGLangEngine
from asyncrl_plugins.sglang.environment import python_of
from asyncrl_plugins.sglang.plugin import SGLangConfig
from rollout_server.engines.base import Completion, GenerationRequest
from tests.rigs.engine_rig import Rig
from tests.rigs.policies import Weights

MISSING = not python_of(SGLangConfig()).is_file()
NEEDS_SGLANG = [
    pytest.mark.slow,
    pytest.mark.skipif(
        MISSING, reason=f"SGLang's environment is missing, {Path(sys.prefix).parent}/.venv-sglang: make install-sglang"
    ),
]


class SGLangRig(Rig):
    engine: SGLangEngine

    def make_engine(self) -> Any:
        self.answers: list[dict[str, Any]] = []
        """Answers of SGLang to requests for completions, as they came."""
        return WatchedEngine(self.config, self.processor, self.answers)

    async def sampled(self, tokens: int, requests: Sequence[GenerationRequest]) -> None:
        """Wait until sequences of running requests have about so many tokens, which SGLang says only at their ends: one
        that came after them and has as many images, which are prepared before a sequence begins, is at its own."""
        self.numbers += 1
        like = max(requests, key=lambda request: len(request.prompt.images))
        settings = like.sampling.model_copy(update={"max_new_tokens": tokens})
        await self.complete([replace(like, request_id=self.numbers, group_size=1, sampling=settings)])

    async def update_after(
        self, weights: Weights, tokens: int, requests: Sequence[GenerationRequest]
    ) -> dict[tuple[int, int], Completion]:
        """New weights when the requests' sequences have about so many tokens."""
        sampling = asyncio.create_task(self.complete(requests))
        await self.sampled(tokens, requests)
        if self.engine._config.rollout.weight_update != "drain":
            # Sampling 300 tokens takes a second here: it stands still while the version is published and verified.
            assert self.engine._client is not None
            await self.engine._client.call("/pause_generation", {"mode": "retract"}, timeout_s=30)
        assert not sampling.done(), "the requests were too short"
        await self.update(weights)
        return await sampling


class WatchedEngine(SGLangEngine):
    def __init__(self, config: Any, processor: Any, answers: list[dict[str, Any]]):
        super().__init__(config, processor)
        self._answers = answers

    async def start(self) -> None:
        await super().start()
        assert self._client is not None
        call = self._client.call

        async def watched(path: str, body: dict[str, Any] | None = None, *, timeout_s: float | None) -> Any:
            answer = await call(path, body, timeout_s=timeout_s)
            if path == "/generate":
                self._answers.append(answer)
            return answer

        self._client.call = watched
