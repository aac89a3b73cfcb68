"""Sequences of an engine that runs in processes of its own: each is a request to them, under a name of ours."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable

from rollout_server.engines.base import Completion, FailedRequest, GenerationRequest

ABORT_AGAIN_S = 0.02
"""Seconds between two looks at what was asked to stop, and has not yet."""
Begun = asyncio.Task[Completion | FailedRequest]


class RunningSequences:
    """Names of the sequences in work, those of first turns by their request, and which of them were asked to end."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._of_requests: dict[int, set[str]] = {}
        self._interrupted: set[str] = set()

    def begin(self, request: GenerationRequest, index: int) -> str:
        """A new name, in work from here on."""
        name = f"{request.request_id}-{index}-{next(self._numbers)}"
        if not request.stream:
            self._of_requests.setdefault(request.request_id, set()).add(name)
        return name

    def end(self, request: GenerationRequest, name: str) -> None:
        self._interrupted.discard(name)
        if names := self._of_requests.get(request.request_id):
            names.discard(name)
            if not names:
                del self._of_requests[request.request_id]

    def was_interrupted(self, name: str) -> bool:
        return name in self._interrupted

    async def interrupt(self, request_ids: Collection[int], abort: Callable[[list[str]], Awaitable[object]]) -> None:
        """Return when no first turn of these requests is in work. `abort` asks the engine to end the names."""
        while names := [name for request_id in request_ids for name in self._of_requests.get(request_id, ())]:
            self._interrupted.update(names)
            await abort(names)
            # The engine does not know those that are on the way to it yet: they are asked for again.
            await asyncio.sleep(ABORT_AGAIN_S)


async def completions(
    requests: Iterable[GenerationRequest], version: int, begin: Callable[[GenerationRequest, int], Begun]
) -> AsyncGenerator[Completion | FailedRequest, None]:
    """Each completion as it comes, those first that a ticket's requests put in place whole. All others have begun, by
    `begin`, when the first item is asked for: the engine may not fall asleep in between. Closed, it ends them."""
    tasks: list[Begun] = []
    whole: list[Completion] = []
    for request in requests:
        for index in range(request.group_size):
            if (completion := request.whole(index, version)) is not None:
                whole.append(completion)
            else:
                tasks.append(begin(request, index))
    try:
        for completion in whole:
            yield completion
        for task in asyncio.as_completed(tasks):
            yield await task
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)  # the engine hears of it before we are done
