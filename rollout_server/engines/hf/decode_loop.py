"""The thread of the `hf` engine: it decodes, and runs commands between two steps.

The event loop's side calls `submit`, `order`, `abandon` and `close`; the batch and the version belong to the thread,
that is, to the commands that it runs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

from asyncrl.config.engine_rules import PREFILL_TOKENS
from asyncrl.errors import BadStateError
from rollout_server.engines.base import Completion, EngineDied, EngineUsage, GenerationRequest
from rollout_server.engines.hf.decode_batch import DecodeBatch, DecodeRow

logger = logging.getLogger(__name__)

Deliver = Callable[[Completion | Exception], None]
CLOSE_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Command:
    """Work for the decode thread between two decode steps."""

    run: Callable[[], None]
    done: Future[None]
    drains: bool
    """It runs only when no sequence does; until then none is admitted."""


class DecodeLoop:
    """Continuous batching: whole groups are admitted into `batch` as room comes free."""

    def __init__(self, make_batch: Callable[[], DecodeBatch], max_sequences: int):
        self._make_batch = make_batch
        self._max_sequences = max_sequences
        self.batch = make_batch()
        self.version = 0
        self.asleep = False
        """Set by commands: the weights are away, or not there yet."""
        self._wake_up = threading.Condition()
        self._queue: deque[tuple[GenerationRequest, Deliver]] = deque()
        self._commands: deque[Command] = deque()
        self._deliver: dict[int, Deliver] = {}
        """Callbacks by `id` of the request: a ticket that is issued twice keeps its two requests apart."""
        self._closing = False
        self._failure: Exception | None = None
        """The reason for which this engine can sample no more."""
        self._tokens_generated = 0
        self._busy_s = 0.0
        self.update_pause_s = 0.0
        self.sleep_bytes = 0
        self._thread = threading.Thread(target=self._run, name="hf-decode", daemon=True)
        self._thread.start()

    # --- the event loop's side --------------------------------------------------------------

    def submit(self, requests: Sequence[GenerationRequest], deliver: Deliver) -> list[GenerationRequest]:
        """`deliver` gets each completion, or one exception, on the decode thread. Returns the handles to abandon."""
        submitted = [replace(request) for request in requests]
        with self._wake_up:  # one lock hold: the decode thread sees all of them or none
            self.check_alive()
            self._queue.extend((request, deliver) for request in submitted)
            self._wake_up.notify_all()
        return submitted

    def order(self, run: Callable[[], None], *, drains: bool) -> Future[None]:
        """Have the thread call `run` between two decode steps; with `drains`, when no sequence is running."""
        done: Future[None] = Future()
        with self._wake_up:
            self.check_alive()
            self._commands.append(Command(run, done, drains))
            self._wake_up.notify_all()
        return done

    def abandon(self, submitted: Sequence[GenerationRequest]) -> None:
        """Stop sampling these requests: their completions are not wanted any more."""

        def is_wanted(request: GenerationRequest) -> bool:
            return all(request is not abandoned for abandoned in submitted)

        def drop() -> None:
            self.batch.keep(lambda row: is_wanted(row.request))
            for abandoned in submitted:
                self._deliver.pop(id(abandoned), None)

        with self._wake_up:
            self._queue = deque(entry for entry in self._queue if is_wanted(entry[0]))
            self._commands.append(Command(drop, Future(), drains=False))
            self._wake_up.notify_all()

    def close(self) -> None:
        """Ask the thread to stop and wait for it."""
        with self._wake_up:
            self._closing = True
            self._wake_up.notify_all()
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            logger.warning("the decode thread did not stop within %g s; it ends with the process", CLOSE_TIMEOUT_S)

    @property
    def usage(self) -> EngineUsage:
        queued = sum(request.group_size for request, _ in list(self._queue))
        return EngineUsage(
            tokens_generated=self._tokens_generated,
            busy_s=self._busy_s,
            sequences_running=len(self.batch.rows),
            sequences_queued=queued,
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

    # --- the decode thread's side -----------------------------------------------------------

    def _run(self) -> None:
        """Decode until closed. However the thread ends, every waiting caller gets an answer."""
        reason: Exception = BadStateError("the engine was closed")
        try:
            self._decode_until_closed()
        except Exception as error:
            logger.exception("the decode thread stops")
            reason = error
        self.fail_running(reason, for_good=True)  # from here on `order` refuses
        with self._wake_up:
            left, self._commands = list(self._commands), deque()
        for command in left:
            if command.done.set_running_or_notify_cancel():
                command.done.set_exception(self._death())

    def _decode_until_closed(self) -> None:
        while True:
            with self._wake_up:
                while not self._closing and not self._has_work():
                    self._wake_up.wait()
                if self._closing:
                    return
                commands = self._take_commands()
                admitted = [] if self._commands else self._take_admissible()
            while commands:  # none is kept while we wait for the next: it may hold a whole version of the weights
                self._obey(commands.pop(0))
            started = time.monotonic()
            try:
                self._advance(admitted)
            except Exception as error:
                # The data of these requests, or a full device: their tickets go back to the learner with the reason,
                # and it stops the run at the third attempt. The weights are intact, so the engine goes on.
                logger.exception("decoding failed")
                self.fail_running(error)
            self._busy_s += time.monotonic() - started

    def _has_work(self) -> bool:
        return self._may_obey() or (not self.asleep and bool(self._queue or self.batch.rows))

    def _may_obey(self) -> bool:
        return bool(self._commands) and (not self._commands[0].drains or not self.batch.rows)

    def _take_commands(self) -> list[Command]:
        """Commands in order, up to the first that waits for the running sequences."""
        taken: list[Command] = []
        while self._may_obey():
            taken.append(self._commands.popleft())
        return taken

    def _obey(self, command: Command) -> None:
        done = command.done
        if not done.set_running_or_notify_cancel():
            return
        try:
            command.run()
        except Exception as error:
            logger.exception("engine command failed")
            done.set_exception(error)
        else:
            del command  # nor any longer than until the caller goes on
            done.set_result(None)

    def _take_admissible(self) -> list[GenerationRequest]:
        """Whole groups that fit. Prefills are worth their cost in bulk: wait for a quarter of the room, or for all.

        What is over PREFILL_TOKENS comes with the next pass, before any decoding: memory is bounded, not throughput.
        """
        if self.asleep or not self._queue:
            return []
        room = self._max_sequences - len(self.batch.rows)
        waiting = sum(request.group_size for request, _ in self._queue)
        if self.batch.rows and room < min(self._max_sequences // 4, waiting):
            return []
        admitted: list[GenerationRequest] = []
        longest = 0
        while self._queue and self._queue[0][0].group_size <= room:
            longest = max(longest, len(self._queue[0][0].prompt.token_ids))
            if admitted and longest * (len(admitted) + 1) > PREFILL_TOKENS:
                break
            request, deliver = self._queue.popleft()
            room -= request.group_size
            self._deliver[id(request)] = deliver
            admitted.append(request)
        return admitted

    def _advance(self, admitted: list[GenerationRequest]) -> None:
        finished: list[DecodeRow] = []
        if admitted:
            self._tokens_generated += sum(request.group_size for request in admitted)
            finished += self.batch.admit(admitted, self.version)
        elif self.batch.rows:
            self._tokens_generated += len(self.batch.rows)
            finished += self.batch.step(self.version)
        for row in finished:
            self._deliver[id(row.request)](row.completion())
        for key in {id(row.request) for row in finished} - {id(row.request) for row in self.batch.rows}:
            del self._deliver[key]

    def fail_running(self, error: Exception, *, for_good: bool = False) -> None:
        """Hand the error to every caller that waits for a completion, and forget the sequences.

        `for_good`: they get EngineDied, and no more requests are taken.
        """
        reason = error
        with self._wake_up:
            waiting = {*self._deliver.values(), *(deliver for _, deliver in self._queue)}
            self._deliver.clear()
            self._queue.clear()
            self.batch = self._make_batch()
            if for_good:
                self._failure = self._failure or error
                reason = self._death()
        for deliver in waiting:
            deliver(reason)
