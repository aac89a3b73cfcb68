"""Continuous batching of the `hf` engine: whole groups join one decode batch as room comes free, and what concerns the
model as a whole (new weights, sleep) comes in between two decode steps.

All state belongs to the event loop. The model's work is done on one thread, a decode step at a time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TypeVar

from asyncrl.config.parts import PREFILL_TOKENS
from asyncrl.errors import BadStateError
from rollout_server.engines.base import Completion, EngineDied, EngineUsage, FailedRequest, GenerationRequest
from rollout_server.engines.hf.decode_batch import DecodeBatch, DecodeRow, Joining

logger = logging.getLogger(__name__)

T = TypeVar("T")
_Failure = tuple[GenerationRequest, Exception]
_Suspect = tuple[GenerationRequest, list[DecodeRow]]
"""A request and its unfinished rows, none if it had not joined."""


class DecodeLoop:
    def __init__(self, make_batch: Callable[[], DecodeBatch], max_sequences: int):
        self._make_batch = make_batch
        self._max_sequences = max_sequences
        self.batch = make_batch()
        self.version = 0
        self.asleep = False
        """True while the weights are away, or not there yet."""
        self._turn = asyncio.Condition()
        """Held while the model works."""
        self._thread = ThreadPoolExecutor(1, "hf-decode")
        self._queue: deque[GenerationRequest] = deque()
        self._arrivals: dict[int, asyncio.Queue[Completion | FailedRequest | EngineDied]] = {}
        """Takers of completions by `id` of the request; a request without one is not wanted any more."""
        self._suspects: deque[_Suspect] = deque()
        """Requests of which one made a shared step fail. They go on one after another, before any other is admitted."""
        self._draining = 0
        self._failure: Exception | None = None
        """The reason for which this engine can sample no more."""
        self._tokens_generated = 0
        self._busy_s = 0.0
        self.update_pause_s = 0.0
        self.sleep_bytes = 0

    def start(self) -> None:
        self._task = asyncio.create_task(self._decode_until_closed())

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])  # unlike the task itself, this does not raise where it had not begun
        await asyncio.to_thread(self._thread.shutdown)

    async def on_thread(self, work: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncGenerator[Completion | FailedRequest]:
        """Admit the requests together; closing the iterator early drops what still runs."""
        arrived: asyncio.Queue[Completion | FailedRequest | EngineDied] = asyncio.Queue()
        mine = [replace(request) for request in requests]  # a ticket that is issued twice keeps its two requests apart
        try:
            async with self._turn:
                self.check_alive()
                self._arrivals |= {id(request): arrived for request in mine}
                self._queue.extend(mine)
                self._turn.notify_all()
            unfinished = {(request.request_id, request.stream): request.group_size for request in mine}
            while unfinished:
                item = await arrived.get()
                if isinstance(item, EngineDied):
                    raise item
                key = item.request_id, item.stream
                unfinished[key] -= 1
                if isinstance(item, FailedRequest) or not unfinished[key]:
                    del unfinished[key]
                yield item
        finally:
            for request in mine:
                self._arrivals.pop(id(request), None)
            self._queue = deque(request for request in self._queue if id(request) in self._arrivals)
            self._suspects = deque(suspect for suspect in self._suspects if id(suspect[0]) in self._arrivals)

    async def interrupt(self, request_ids: Collection[int]) -> None:
        """Take these requests, but for later turns, out of the batch: their completions are delivered as they are.
        Later turns run on."""

        def is_meant(request: GenerationRequest) -> bool:
            return request.request_id in request_ids and not request.stream

        async with self._turn:
            running = [row for row in self.batch.rows if is_meant(row.request)]
            if running:
                await self.on_thread(self.batch.keep, lambda row: not is_meant(row.request))
            for request, rows in self._suspects:
                running += rows if is_meant(request) else ()
            self._deliver(running)
            for request in [*self._queue, *(request for request, rows in self._suspects if not rows)]:
                if is_meant(request) and (arrived := self._arrivals.get(id(request))):
                    for index in range(request.group_size):
                        arrived.put_nowait(request.begun(index, self.version))
            self._queue = deque(request for request in self._queue if not is_meant(request))
            self._suspects = deque(suspect for suspect in self._suspects if not is_meant(suspect[0]))
            self._turn.notify_all()

    @asynccontextmanager
    async def between_steps(self, *, drains: bool) -> AsyncIterator[None]:
        """Block in which no decode step runs; with `drains` no sequence does, and until then none is admitted."""
        async with self._turn:
            self._draining += drains
            try:
                await self._turn.wait_for(lambda: not (drains and (self.batch.rows or self._suspects)))
            finally:
                self._draining -= drains
            self.check_alive()
            try:
                yield
            finally:
                self._turn.notify_all()

    @property
    def usage(self) -> EngineUsage:
        return EngineUsage(
            tokens_generated=self._tokens_generated,
            busy_s=self._busy_s,
            sequences_running=len(self.batch.rows),
            update_pause_s=self.update_pause_s,
            sleep_bytes=self.sleep_bytes,
        )

    def check_alive(self) -> None:
        if self._failure is not None:
            raise self._death()

    def _death(self) -> EngineDied:
        death = EngineDied(f"the hf engine has stopped: {self._failure}")
        death.__cause__ = self._failure
        return death

    def fail_running(self, error: Exception, joining: Sequence[GenerationRequest] = ()) -> None:
        """Fail the request that is decoded or joining. Of several it may be any one's fault: they become suspects.

        Those `joining` begin anew: none of their completions has been delivered.
        """
        begin_anew = {id(request) for request in joining}
        running = [row for row in self.batch.rows if id(row.request) not in begin_anew]
        self.batch = self._make_batch()
        self._deliver(row for row in running if row.finish_reason)
        suspects: dict[int, _Suspect] = {id(request): (request, []) for request in joining}
        for row in running:
            if not row.finish_reason:
                suspects.setdefault(id(row.request), (row.request, []))[1].append(row)
        if len(suspects) > 1:
            logger.warning("%d tickets failed together and go on one by one: %s", len(suspects), error)
            self._suspects.extend(suspects.values())
        else:
            for request, _ in suspects.values():
                self._fail(request, error)

    def _fail(self, request: GenerationRequest, error: Exception) -> None:
        if arrived := self._arrivals.pop(id(request), None):
            arrived.put_nowait(FailedRequest(request.request_id, error, request.stream))

    def end(self, error: Exception) -> None:
        """Take no more requests: every caller that waits for a completion gets EngineDied."""
        self._failure = self._failure or error
        for arrived in set(self._arrivals.values()):
            arrived.put_nowait(self._death())
        self._arrivals.clear()
        self._queue.clear()
        self._suspects.clear()
        self.batch = self._make_batch()

    async def _decode_until_closed(self) -> None:
        """Decode until closed; every waiting caller gets a result or an error."""
        reason: Exception = BadStateError("the engine was closed")
        try:
            while True:
                async with self._turn:
                    await self._turn.wait_for(
                        lambda: not self.asleep and (self._admissible() or self.batch.rows or self._suspects)
                    )
                    await self._advance(self._take_admissible())
                    self._turn.notify_all()
        except asyncio.CancelledError:
            pass
        except Exception as error:
            logger.exception("decoding stops")
            reason = error
        self.end(reason)
        async with self._turn:
            self._turn.notify_all()

    def _admissible(self) -> bool:
        """True if enough slots are free to prefill in bulk: a quarter of them, or enough for all that waits."""
        if self._draining or self._suspects or not self._queue:
            return False
        room = self._max_sequences - len(self.batch.rows)
        waiting = sum(request.group_size for request in self._queue)
        return not self.batch.rows or room >= min(self._max_sequences // 4, waiting)

    def _take_admissible(self) -> list[GenerationRequest]:
        """Take whole groups that fit, at most PREFILL_TOKENS per pass but one at least; the rest precedes decoding."""
        admitted: list[GenerationRequest] = []
        room, longest = self._max_sequences - len(self.batch.rows), 0
        while self._admissible() and self._queue[0].group_size <= room:
            longest = max(longest, len(self._queue[0].prompt.token_ids))
            if admitted and longest * (len(admitted) + 1) > PREFILL_TOKENS:
                break
            admitted.append(self._queue.popleft())
            room -= admitted[-1].group_size
        return admitted

    async def _advance(self, admitted: list[GenerationRequest]) -> None:
        """Prefill what is admitted, or else add a token to every sequence."""
        started = time.monotonic()
        resumed: list[DecodeRow] = []
        if self._suspects and not self.batch.rows:
            request, resumed = self._suspects.popleft()
            admitted = [] if resumed else [request]
        try:
            finished, failed = await self.on_thread(self._work, admitted, resumed)
        except Exception as error:
            # A full device, perhaps: the ticket at fault goes back to the learner with the reason, and it stops the run
            # at the third attempt. The weights are intact, so the engine goes on.
            logger.exception("decoding failed")
            self.fail_running(error, admitted)
            return
        finally:
            self._busy_s += time.monotonic() - started
        for request, error in failed:
            self._fail(request, error)
        self._deliver(finished)

    def _deliver(self, finished: Iterable[DecodeRow]) -> None:
        for row in finished:
            if arrived := self._arrivals.get(id(row.request)):
                arrived.put_nowait(row.completion())

    def _work(
        self, admitted: list[GenerationRequest], resumed: list[DecodeRow]
    ) -> tuple[list[DecodeRow], list[_Failure]]:
        """The thread's part of one iteration: the rows that finished, and the requests that have to leave."""
        if resumed:
            self.batch.resume(resumed)
        if any(id(row.request) not in self._arrivals for row in self.batch.rows):
            self.batch.keep(lambda row: id(row.request) in self._arrivals)
        if admitted:
            ready, failed = self._prefill(admitted)
            self._tokens_generated += sum(joining.num_sampled for joining in ready)
            return [row for joining in ready for row in self.batch.join(joining)], failed
        self._tokens_generated += len(self.batch.rows)
        return self.batch.step(self.version) if self.batch.rows else [], []

    def _prefill(self, admitted: list[GenerationRequest]) -> tuple[list[Joining], list[_Failure]]:
        """Compute the prompts in one pass; where that fails, one by one, to tell the bad ones from the others."""
        try:
            return [self.batch.prefill(admitted, self.version)], []
        except Exception as error:
            if len(admitted) == 1:
                logger.exception("the prompt of ticket %d failed", admitted[0].request_id)
                return [], [(admitted[0], error)]
            logger.warning("the prompts of %d tickets failed together: %s", len(admitted), error)
        each = [self._prefill([request]) for request in admitted]
        return [joining for ready, _ in each for joining in ready], [one for _, failed in each for one in failed]
