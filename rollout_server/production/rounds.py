"""How turns of conversations get to the engine: each at once, or all of a batch of tickets in rounds.

Which sequences are decoded beside a sequence changes the last bits of its log-probs. In rounds all live trajectories
are sampled together, each time when the last one has been answered: who is beside whom follows from what was sampled,
not from how long environments take, and a run on policy repeats bit for bit. The price is that each round waits for its
slowest environment.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager

from rollout_server.engines.base import Completion, FailedRequest, GenerationRequest, InferenceEngine

Answer = Completion | FailedRequest


class AtOnce:
    """Each request as it comes."""

    def __init__(self, engine: InferenceEngine):
        self._engine = engine

    @contextmanager
    def taking_part(self, count: int) -> Iterator[Callable[[], None]]:
        """Block of `count` trajectories; what it gives is called at the end of each."""
        yield lambda: None

    async def sample(self, request: GenerationRequest) -> AsyncIterator[Answer]:
        """Completions of a request, or its failure. Raises EngineDied."""
        async for item in self._engine.generate([request]):
            yield item


class Rounds(AtOnce):
    """The rounds of one batch of tickets, which begin when every trajectory that takes part waits for its turn."""

    def __init__(self, engine: InferenceEngine):
        super().__init__(engine)
        self._live = 0
        """Trajectories that take part."""
        self._waiting: list[tuple[GenerationRequest, asyncio.Future[list[Answer]]]] = []
        self._round: asyncio.Task[None] | None = None

    @contextmanager
    def taking_part(self, count: int) -> Iterator[Callable[[], None]]:
        left = 0
        self._live += count

        def leave() -> None:
            nonlocal left
            left += 1
            self._leave(1)

        try:
            yield leave
        finally:
            self._leave(count - left)

    def _leave(self, count: int) -> None:
        self._live -= count
        if self._round is not None and not self._live:  # nobody waits for it any more
            self._round.cancel()
        self._begin_if_complete()

    async def sample(self, request: GenerationRequest) -> AsyncIterator[Answer]:
        """Sample the turn in the next round, which is returned whole."""
        answer: asyncio.Future[list[Answer]] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, answer))
        self._begin_if_complete()
        try:
            items = await answer
        finally:
            self._waiting = [waiting for waiting in self._waiting if waiting[1] is not answer]
        for item in items:
            yield item

    def _begin_if_complete(self) -> None:
        waiting = sum(request.group_size for request, _ in self._waiting)
        if self._round is None and waiting and waiting == self._live:
            together = sorted(self._waiting, key=lambda pair: (pair[0].request_id, pair[0].stream))
            self._waiting = []
            self._round = asyncio.create_task(self._sample(together))

    async def _sample(self, together: list[tuple[GenerationRequest, asyncio.Future[list[Answer]]]]) -> None:
        answers: dict[tuple[int, tuple[int, ...]], list[Answer]] = defaultdict(list)
        error: Exception | None = None
        try:
            async for item in self._engine.generate([request for request, _ in together]):
                answers[item.request_id, item.stream].append(item)
        except Exception as problem:  # the engine's end, which all of them are told
            error = problem
        self._round = None
        for request, answer in together:
            if answer.done():  # whoever waited has been cancelled
                continue
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(answers[request.request_id, request.stream])
