"""Production of a group from its ticket: generate, score each completion as it finishes, join the columns.

A ticket fails alone: the others of its message go on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from asyncrl.config.service_sections import RolloutConfig
from asyncrl.environments.episodes import EnvironmentFailed
from asyncrl.errors import UserError
from asyncrl.processing.processor import PromptProcessor
from asyncrl.rewards.sample import sample_of
from asyncrl.rewards.score import Score
from asyncrl.rewards.scorer import GroupScoring, RewardScorer
from protocol.messages import (
    FinishReason,
    Group,
    GroupTimings,
    PartialRollout,
    Ticket,
    TicketFailed,
    TicketKind,
    TicketReturned,
    TokenSource,
    TokenTraces,
    TrajectoryRecord,
    TrajectoryRole,
    Turn,
)
from rollout_server.engines.base import (
    Completion,
    EngineDied,
    FailedRequest,
    GenerationRequest,
    InferenceEngine,
)
from rollout_server.production.conversation import ConversationProducer
from rollout_server.production.environments import Environments
from rollout_server.production.rounds import AtOnce
from rollout_server.production.trajectory import status_of

logger = logging.getLogger(__name__)
MESSAGE_LENGTH = 1000
"""Characters of an exception that travel to the learner."""
Answer = Group | TicketFailed | TicketReturned
"""Result of a ticket."""
SETTINGS = ("temperature", "top_p", "top_k", "min_p")
INTERRUPT_AGAIN_S = 0.02
"""Seconds between two looks at what was interrupted, and had not reached the engine yet."""


@dataclass
class _GroupInProgress:
    ticket: Ticket
    request: GenerationRequest
    blobs: Mapping[str, bytes]
    """Encoded media of its prompt by content hash."""
    started_at: float
    scoring: GroupScoring | None
    """None: nothing is scored here."""
    completions: dict[int, Completion] = field(default_factory=dict)
    scores: list[asyncio.Task[tuple[int, Score]]] = field(default_factory=list)
    generated: asyncio.Future[float] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """Monotonic seconds at which the last completion ended, or the engine's error."""


class GroupProducer:
    """Produces groups from tickets; calls of `produce` may overlap."""

    def __init__(
        self,
        engine: InferenceEngine,
        rewards: RewardScorer,
        processor: PromptProcessor,
        server_id: str,
        environments: Environments | None = None,
    ):
        """`environments` answer the turns of tickets that ask for a conversation."""
        self._engine = engine
        self._rewards = rewards
        self._processor = processor
        self._server_id = server_id
        self._sampling: dict[int, Ticket] = {}
        """Tickets whose completions are not all there. One that was given back may be here again."""
        self._conversations = (
            ConversationProducer(engine, rewards, processor, server_id, environments) if environments else None
        )

    async def produce(self, tickets: Sequence[Ticket], blobs: Mapping[str, memoryview]) -> AsyncIterator[Answer]:
        """Groups and failures, each when it is there, whatever else runs. All tickets of one turn enter the engine
        together; those of conversations when their environments have opened."""
        conversations = [ticket for ticket in tickets if ticket.conversation]
        tickets = [ticket for ticket in tickets if not ticket.conversation]
        self._sampling |= {ticket.ticket_id: ticket for ticket in tickets}
        requests = await asyncio.to_thread(lambda: [self._request(ticket, blobs) for ticket in tickets])
        started_at = time.monotonic()
        progress: dict[int, _GroupInProgress] = {}
        turns = self._conversations.turns() if self._conversations else None
        for ticket, request in zip(tickets, requests, strict=True):
            if isinstance(request, GenerationRequest):
                progress[ticket.ticket_id] = _GroupInProgress(
                    ticket=ticket,
                    request=request,
                    blobs={digest: bytes(blobs[digest]) for digest in ticket.prompt.media_hashes},
                    started_at=started_at,
                    scoring=None if ticket.kind is TicketKind.PARITY else self._rewards.group(ticket.group_size),
                )
        tasks: list[asyncio.Task[Answer | None]] = [
            asyncio.create_task(self._generate(progress)),
            *(asyncio.create_task(self._converse(ticket, blobs, turns)) for ticket in conversations),
            *(asyncio.create_task(self._finish(group)) for group in progress.values()),
        ]
        try:
            for ticket, failed in zip(tickets, requests, strict=True):
                if isinstance(failed, TicketFailed):
                    self._has_ended(ticket)
                    yield failed
            for task in asyncio.as_completed(tasks):
                finished = await task
                if finished is not None:
                    yield finished
        finally:
            for ticket in tickets:
                self._has_ended(ticket)
            for task in [*tasks, *(score for group in progress.values() for score in group.scores)]:
                task.cancel()

    async def _converse(
        self, ticket: Ticket, blobs: Mapping[str, memoryview], turns: AtOnce | None
    ) -> Group | TicketFailed:
        try:
            if self._conversations is None or turns is None:
                raise UserError("the ticket asks for a conversation, and this server has no environment")
            return await self._conversations.produce(ticket, blobs, turns)
        except EngineDied:
            raise
        except Exception as error:
            logger.exception("ticket %d (row %s) failed", ticket.ticket_id, ticket.prompt.row_id)
            return ticket_failed(ticket, error)

    def _request(self, ticket: Ticket, blobs: Mapping[str, memoryview]) -> GenerationRequest | TicketFailed:
        prepare = self._processor.encode if self._engine.takes_pixels else self._processor.measure
        try:
            return GenerationRequest(
                request_id=ticket.ticket_id,
                prompt=prepare(ticket.prompt, blobs),
                group_size=ticket.group_size,
                seed=ticket.seed,
                sampling=ticket.sampling,
                requests=ticket.requests,
                partial=ticket.partial,
                seen={
                    images: prepare(ticket.prompt.model_copy(update={"image_hashes": images}), blobs)
                    for images in {wanted.images for wanted in ticket.requests if wanted.images}
                },
            )
        except Exception as error:
            logger.exception("ticket %d (row %s) failed", ticket.ticket_id, ticket.prompt.row_id)
            return ticket_failed(ticket, error)

    async def _generate(self, progress: Mapping[int, _GroupInProgress]) -> None:
        """Hand each completion to its group, and start to score it."""
        async for item in self._engine.generate([group.request for group in progress.values()]):
            group = progress[item.request_id]
            if group.generated.done():  # it has failed
                continue
            if isinstance(item, FailedRequest):
                self._has_ended(group.ticket)
                group.generated.set_exception(item.error)
                continue
            partial = group.ticket.partial
            group.completions[item.index] = item.behind(partial) if partial else item
            if item.finish_reason is not None:
                group.scores.append(asyncio.create_task(self._score(group, item)))
            if len(group.completions) == group.ticket.group_size:
                self._has_ended(group.ticket)
                group.generated.set_result(time.monotonic())

    async def _score(self, group: _GroupInProgress, completion: Completion) -> tuple[int, Score]:
        if group.scoring is None:
            return completion.index, Score(reward=0.0)
        sample = sample_of(
            group.ticket.prompt,
            self._processor.decode(completion.token_ids),
            group.blobs,
            "length" if completion.finish_reason is FinishReason.LENGTH else "stop",
            num_tokens=len(completion.token_ids),
            max_tokens=group.ticket.sampling.max_new_tokens,
        )
        return completion.index, await group.scoring.score(completion.index, sample)

    async def interrupt(self, ticket_ids: Collection[int]) -> None:
        """Give these tickets back as they are; those that are complete, and conversations, go on."""
        meant = {i: self._sampling[i] for i in ticket_ids if i in self._sampling}
        while left := [i for i, ticket in meant.items() if self._sampling.get(i) is ticket]:
            await self._engine.interrupt(left)
            # The engine does not know those whose prompts are being encoded yet: they are asked for again.
            await asyncio.sleep(INTERRUPT_AGAIN_S)

    def _has_ended(self, ticket: Ticket) -> None:
        """Note that nothing of it is sampled any more."""
        if self._sampling.get(ticket.ticket_id) is ticket:
            del self._sampling[ticket.ticket_id]

    async def _finish(self, group: _GroupInProgress) -> Answer:
        try:
            generated_at = await group.generated
            if any(c.finish_reason is None for c in group.completions.values()):
                for score in group.scores:
                    score.cancel()
                if any(c.traces for c in group.completions.values()):  # which a partial rollout does not carry
                    return ticket_as_it_came(group.ticket)
                return TicketReturned(
                    ticket_id=group.ticket.ticket_id,
                    partial=partial_rollout(group.completions.values()),
                )
            return self._joined(group, generated_at, dict(await asyncio.gather(*group.scores)))
        except Exception as error:
            logger.exception("ticket %d (row %s) failed", group.ticket.ticket_id, group.ticket.prompt.row_id)
            return ticket_failed(group.ticket, error)

    def _joined(self, group: _GroupInProgress, generated_at: float, scores: Mapping[int, Score]) -> Group:
        ordered = [group.completions[index] for index in range(group.ticket.group_size)]
        request = group.request
        prefixes = [len(request.requested(c.index)) for c in ordered]
        records = [trajectory_record(request, c, scores[c.index], group.ticket.role(c.index)) for c in ordered]
        lengths = np.asarray([len(c.token_ids) for c in ordered], np.int32)
        inserted = [np.arange(length) < n for length, n in zip(lengths, prefixes, strict=True)]
        prompt = group.request.prompt
        return Group(
            ticket_id=group.ticket.ticket_id,
            server_id=self._server_id,
            prompt_ids=prompt.token_ids,
            image_grids=prompt.image_grids,
            image_hashes=prompt.image_hashes,
            video_grids=prompt.video_grids if len(prompt.video_grids) else None,
            video_hashes=prompt.video_hashes,
            lengths=lengths,
            token_ids=np.concatenate([c.token_ids for c in ordered]),
            source=np.where(np.concatenate(inserted), TokenSource.INSERTED, TokenSource.POLICY).astype(np.uint8),
            logprobs=np.concatenate([c.logprobs for c in ordered]),
            versions=np.concatenate([c.versions for c in ordered]),
            trajectories=tuple(records),
            timings=GroupTimings(
                generate_s=generated_at - group.started_at,
                reward_s=time.monotonic() - generated_at,
            ),
            traces=joined_traces([c.traces for c in ordered], [bool(request.images_of(c.index)) for c in ordered]),
        )


def partial_rollout(completions: Iterable[Completion]) -> PartialRollout:
    """All completions of a group, in any order, finished or not, as the columns of a partial rollout."""
    ordered = sorted(completions, key=lambda completion: completion.index)
    return PartialRollout(
        lengths=np.asarray([len(completion.token_ids) for completion in ordered], np.int32),
        token_ids=np.concatenate([c.token_ids for c in ordered]),
        logprobs=np.concatenate([c.logprobs for c in ordered]),
        versions=np.concatenate([c.versions for c in ordered]),
    )


def ticket_as_it_came(ticket: Ticket) -> TicketReturned:
    """The answer to a ticket that is given back before anything was sampled of it."""
    nothing = PartialRollout(
        lengths=np.zeros(ticket.group_size, np.int32),
        token_ids=np.empty(0, np.int32),
        logprobs=np.empty(0, np.float32),
        versions=np.empty(0, np.int32),
    )
    return TicketReturned(ticket_id=ticket.ticket_id, partial=ticket.partial or nothing)


def ticket_failed(ticket: Ticket, error: Exception) -> TicketFailed:
    """The answer to a ticket whose group could not be made."""
    kind = error.kind if isinstance(error, EnvironmentFailed) else type(error).__name__
    return TicketFailed(ticket_id=ticket.ticket_id, error_kind=kind, error_message=str(error)[:MESSAGE_LENGTH])


def trajectory_record(
    request: GenerationRequest, completion: Completion, score: Score, role: TrajectoryRole
) -> TrajectoryRecord:
    prefix, length = len(request.requested(completion.index)), len(completion.token_ids)
    seen = request.seen_by(completion.index).image_hashes
    assert completion.finish_reason is not None, "an unfinished completion has no record"
    return TrajectoryRecord(
        status=status_of(score, is_cut=completion.finish_reason is not FinishReason.STOP),
        finish_reason=completion.finish_reason,
        role=role,
        error_kind=score.error_kind,
        error_message=score.error_message,
        rewards=score.components,
        reward=score.reward,
        image_hashes=seen if request.images_of(completion.index) else (),
        turns=(Turn(start=prefix, end=length),) if prefix < length else (),
    )


def check_sampling(tickets: Iterable[Ticket], config: RolloutConfig) -> None:
    """Raise UserError if learner and server were started with different `rollout` settings.

    The ticket's settings would be used, and this server's own silently ignored.
    """
    for ticket in tickets:
        if ticket.kind is TicketKind.EVAL:
            continue
        differing = [
            f"rollout.{name} is {getattr(config, name):g} here and {getattr(ticket.sampling, name):g} at the learner"
            for name in SETTINGS
            if getattr(config, name) != getattr(ticket.sampling, name)
        ]
        if differing:
            raise UserError(f"{'; '.join(differing)}. Start both services with the same configuration")


def joined_traces(
    traces: Sequence[Mapping[str, TokenTraces]], saw_others: Sequence[bool] = ()
) -> dict[str, TokenTraces]:
    """Traces of a group from those of its trajectories; the prompt's are of the first that did not see other images."""
    first = traces[[*saw_others, False].index(False) % len(traces)]
    return {
        name: TokenTraces(prompt=of_name.prompt, completions=np.concatenate([t[name].completions for t in traces]))
        for name, of_name in first.items()
    }
