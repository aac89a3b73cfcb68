"""Conversations: the policy takes a turn, an environment answers, and all of it stays one row of tokens.

A trajectory that waits for its environment occupies no decoding slot. Its next turn is a new request whose prompt is
the whole row. New weights are loaded between turns, and a slow environment delays its own trajectory alone.
The random numbers of a turn follow from the ticket's seed, the trajectory's index and the turn's number, whatever else
is sampled beside it and whenever an environment answers.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from math import inf, isfinite

import numpy as np

from asyncrl.data.images import content_hash
from asyncrl.data.survey.row_survey import overlong_opening
from asyncrl.environments.episodes import EnvironmentFailed
from asyncrl.environments.observation import Message, Observation, Part, recorded_info
from asyncrl.environments.recording import recorded, recorded_calls, recorded_history
from asyncrl.errors import BadStateError, UserError
from asyncrl.processing.bridge import TurnBridge, start_of
from asyncrl.processing.history import History, Shown
from asyncrl.processing.processor import PromptProcessor
from asyncrl.rewards.sample import sample_of
from asyncrl.rewards.score import Score
from asyncrl.rewards.scorer import RewardScorer
from protocol.messages import (
    NO_REQUEST,
    ConversationLimits,
    FinishReason,
    Group,
    GroupTimings,
    Limit,
    Prompt,
    Sampling,
    Ticket,
    TokenSource,
)
from rollout_server.engines.base import (
    Completion,
    FailedRequest,
    GenerationRequest,
    InferenceEngine,
)
from rollout_server.production.environments import Environments
from rollout_server.production.rounds import AtOnce, Rounds
from rollout_server.production.trajectory import Trajectory

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Ticket:
    """A ticket whose environments have opened."""

    ticket: Ticket
    limits: ConversationLimits
    bridge: TurnBridge
    prompt: Prompt
    """Prompt with the opening."""
    blobs: Mapping[str, bytes]
    """Encoded media of that prompt by content hash."""
    opening: Observation | None
    first: GenerationRequest
    """The first turns."""
    turns: AtOnce
    """The way of all turns to the engine."""
    started_at: float

    def sampling(self, length: int) -> Sampling:
        """How a turn is sampled behind `length` tokens."""
        room = min(self.limits.tokens_per_turn, self.ticket.sampling.max_new_tokens - length)
        return self.ticket.sampling.model_copy(update={"max_new_tokens": room})

    def later_turn(self, trajectory: Trajectory, history: History) -> GenerationRequest:
        """The request for the next turn of a trajectory, whose prompt is all tokens of its segment."""
        wanted = self.ticket.request(trajectory.index)
        return replace(
            self.first,
            prompt=self.first.prompt.followed_by(history.pieces),
            group_size=1,
            sampling=self.sampling(trajectory.length),
            requests=(wanted,) if wanted != NO_REQUEST else (),
            stream=(trajectory.index, len(trajectory.turns)),
        )


class ConversationProducer:
    """Produces the groups of tickets whose turns an environment answers; calls of `produce` may overlap."""

    def __init__(
        self,
        engine: InferenceEngine,
        rewards: RewardScorer,
        processor: PromptProcessor,
        server_id: str,
        environments: Environments,
    ):
        self._engine = engine
        self._rewards = rewards
        self._processor = processor
        self._server_id = server_id
        self._environments = environments
        self._bridges: dict[tuple[int, ...], TurnBridge] = {}
        self._left = environments.capacity
        self._freed = asyncio.Condition()

    def turns(self) -> AtOnce:
        """How the turns of tickets that are produced together get to the engine."""
        return Rounds(self._engine) if self._environments.in_rounds else AtOnce(self._engine)

    async def produce(self, ticket: Ticket, blobs: Mapping[str, memoryview], turns: AtOnce) -> Group:
        """Raises what makes the group impossible: its environments do not begin, or its requests cannot be sampled."""
        async with self._places(ticket.group_size):
            trajectories = [Trajectory(index, self._environments.make()) for index in range(ticket.group_size)]
            try:
                with turns.taking_part(ticket.group_size) as leave:
                    opened = await self._open(ticket, blobs, trajectories, turns)
                    await self._talk_all(opened, trajectories, leave)
            finally:
                await asyncio.gather(*(trajectory.close() for trajectory in trajectories))
        generated_at = time.monotonic()
        scores = await self._score(opened, trajectories)
        return self._group(opened, trajectories, scores, generated_at)

    @asynccontextmanager
    async def _places(self, count: int) -> AsyncGenerator[None]:
        """Hold the places of a whole group: groups with some of theirs would wait for each other."""
        if count > self._environments.capacity:
            raise UserError(
                f"a group has {count} trajectories, and there is room for {self._environments.capacity:g} environments "
                "at a time. Raise environment.workers or environment.instances_per_worker"
            )
        async with self._freed:
            await self._freed.wait_for(lambda: self._left >= count)
            self._left -= count
        try:
            yield
        finally:
            self._left += count
            async with self._freed:
                self._freed.notify_all()

    # --- the beginning --------------------------------------------------------------------------

    async def _open(
        self, ticket: Ticket, blobs: Mapping[str, memoryview], trajectories: Sequence[Trajectory], turns: AtOnce
    ) -> _Ticket:
        started_at = time.monotonic()
        assert ticket.conversation is not None, "GroupProducer takes tickets of one turn"
        images = [bytes(blobs[digest]) for digest in ticket.prompt.image_hashes]
        resets = (
            t.environment.reset(start_of(ticket.prompt, images, ticket.seed, t.index))
            for t in trajectories
            if t.environment
        )
        first, *others = await asyncio.gather(*resets)
        if any(other != first for other in others):
            raise BadStateError(
                "environment_not_repeatable: the environment opens differently for the trajectories of one ticket, "
                "which have the same row and the same seed. What reset() returns must follow from these"
            )
        return await asyncio.to_thread(self._prepare, ticket, ticket.conversation, blobs, first, turns, started_at)

    def _prepare(
        self,
        ticket: Ticket,
        limits: ConversationLimits,
        blobs: Mapping[str, memoryview],
        opening: Observation | None,
        turns: AtOnce,
        started_at: float,
    ) -> _Ticket:
        stops = ticket.sampling.stop_token_ids
        bridge = self._bridges.get(stops) or self._bridges.setdefault(stops, TurnBridge(self._processor, stops))
        prompt = bridge.opened(ticket.prompt, opening) if opening else ticket.prompt
        shown = {content_hash(image): image for image in opening.images} if opening else {}
        found = {**shown, **{digest: bytes(blobs[digest]) for digest in ticket.prompt.media_hashes}}
        prepare = self._processor.encode if self._engine.takes_pixels else self._processor.measure
        encoded, most_tokens = prepare(prompt, found), self._environments.prompt_tokens
        if opening and len(encoded.token_ids) > most_tokens:
            raise UserError(overlong_opening(encoded, most_tokens))
        most = min(limits.tokens_per_turn, ticket.sampling.max_new_tokens)
        first = GenerationRequest(
            request_id=ticket.ticket_id,
            prompt=encoded,
            group_size=ticket.group_size,
            seed=ticket.seed,
            sampling=ticket.sampling.model_copy(update={"max_new_tokens": most}),
            requests=ticket.requests,
        )
        return _Ticket(ticket, limits, bridge, prompt, found, opening, first, turns, started_at)

    # --- turns ----------------------------------------------------------------------------------

    async def _talk_all(self, opened: _Ticket, trajectories: Sequence[Trajectory], leave: Callable[[], None]) -> None:
        talks: list[asyncio.Task[None]] = []
        try:
            async for item in opened.turns.sample(opened.first):
                if isinstance(item, FailedRequest):
                    raise item.error
                talks.append(asyncio.create_task(self._talk(opened, trajectories[item.index], item)))
                talks[-1].add_done_callback(lambda _: leave())
            await asyncio.gather(*talks)
        finally:
            for talk in talks:
                talk.cancel()
            await asyncio.gather(*talks, return_exceptions=True)

    async def _talk(self, opened: _Ticket, trajectory: Trajectory, first: Completion) -> None:
        """Take turns with the environment; where it fails, again from the first turn on."""
        await self._play(opened, trajectory, first)
        for _ in range(self._environments.retries):
            if trajectory.failure is None or not await self._begins_anew(opened, trajectory):
                break
            await self._play(opened, trajectory, first)
        await trajectory.close()

    async def _begins_anew(self, opened: _Ticket, trajectory: Trajectory) -> bool:
        """Whether another environment has opened for a trajectory as the first one did."""
        await trajectory.close()
        environment = self._environments.make()
        images = [opened.blobs[digest] for digest in opened.ticket.prompt.image_hashes]
        try:
            opening = await environment.reset(
                start_of(opened.ticket.prompt, images, opened.ticket.seed, trajectory.index)
            )
        except Exception as error:
            logger.warning("row %s: an environment does not begin again: %s", opened.prompt.row_id, error)
            opening = None
        if opening != opened.opening:
            trajectory.environment = environment  # to be closed; the first failure stands
            return False
        trajectory.begin_anew(environment)
        return True

    async def _play(self, opened: _Ticket, trajectory: Trajectory, turn: Completion) -> None:
        """Take turns until policy, environment or a limit ends them."""
        history = History(opened.bridge, opened.limits, opened.ticket.prompt, pixels=self._engine.takes_pixels)
        while True:
            trajectory.add_turn(turn)
            history.add_turn(turn.token_ids)
            trajectory.text = self._processor.decode(turn.token_ids)
            if turn.finish_reason is FinishReason.LENGTH:  # what was cut off is no answer and no call
                break
            answered = await self._answer(opened, trajectory, history)
            if answered is None:
                break
            trajectory.add_observation(*answered)
            history.show(*answered)
            (sampled,) = [item async for item in opened.turns.sample(opened.later_turn(trajectory, history))]
            if isinstance(sampled, FailedRequest):
                raise sampled.error
            turn = sampled

    async def _answer(
        self, opened: _Ticket, trajectory: Trajectory, history: History
    ) -> tuple[Observation, Shown] | None:
        """Observation after a turn, and its tokens; None where the trajectory has ended."""
        began = time.monotonic()
        assert trajectory.environment is not None, "it is closed at the end of the trajectory"
        try:
            result = await trajectory.environment.step(trajectory.text)
            if not isfinite(result.reward):
                raise ValueError(f"the reward of a turn is {result.reward}")
            calls, info = recorded_calls(result.info), recorded_info(result.info)
        except Exception as error:  # the environment's own, or of its process
            kind = error.kind if isinstance(error, EnvironmentFailed) else "environment_exception"
            return self._fails(opened, trajectory, kind, f"{type(error).__name__}: {error}")
        finally:
            trajectory.environment_s += time.monotonic() - began
        trajectory.describe_turn(
            reward=float(result.reward), state_key=result.state_key[:16].hex(), calls=calls, info=info
        )
        if unshown := result.info.get("unshown_image"):
            logger.warning("row %s: an image of turn %d: %s", opened.prompt.row_id, len(trajectory.turns), unshown)
        if result.done or result.observation is None:
            return None
        observation = self._shortened(result.observation)
        edited = [replace(past, shown=past.shown and self._shortened(past.shown)) for past in result.history]
        try:
            shown = await asyncio.to_thread(history.after, observation, edited)
        except UserError as error:  # an image that cannot be read, or a history that cannot be
            return self._fails(opened, trajectory, "environment_observation", str(error))
        trajectory.limit = self._limit(opened, trajectory, observation, shown.num_tokens)
        if edited and not trajectory.limit:
            before = [message for turn in trajectory.turns for message in turn.observation]
            trajectory.describe_turn(history=recorded_history(edited, before))
        return None if trajectory.limit else (observation, shown)

    def _fails(self, opened: _Ticket, trajectory: Trajectory, kind: str, message: str) -> None:
        """Note, and log, that the environment has lost a trajectory."""
        trajectory.failure = kind, message
        logger.warning("row %s: %s: %s", opened.prompt.row_id, kind, message)

    def _shortened(self, observation: Observation) -> Observation:
        """The observation with as much text as one may have, beside what asyncrl itself says."""
        left = self._environments.text_tokens
        messages: list[Message] = []
        for message in observation.messages:
            parts: list[Part] = []
            for number, part in enumerate(message.parts):
                if isinstance(part, str) and left < inf and number not in message.own:
                    starts = self._processor.starts_of_tokens(part)
                    if (over := len(starts) - int(left)) > 0:
                        part = f"{part[: starts[int(left)]]} [cut: {over} more tokens]"
                    left = max(0, left - len(starts))
                parts.append(part)
            messages.append(Message(message.role, tuple(parts)))
        return Observation(tuple(messages))

    def _limit(self, opened: _Ticket, trajectory: Trajectory, observation: Observation, tokens: int) -> Limit:
        """The limit that keeps an observation out. It is added as a whole or not at all."""
        if len(trajectory.turns) >= opened.limits.turns:
            return "turns"
        if len(trajectory.images) + len(observation.images) > opened.limits.images:
            return "images"
        if trajectory.length + tokens >= opened.ticket.sampling.max_new_tokens:
            return "tokens"
        return "seconds" if time.monotonic() - opened.started_at > self._environments.trajectory_s else ""

    # --- the end --------------------------------------------------------------------------------

    async def _score(self, opened: _Ticket, trajectories: Sequence[Trajectory]) -> dict[int, Score]:
        """Scores of the trajectories whose environments have not failed, by index: of what the last turn says."""
        whole = [trajectory for trajectory in trajectories if trajectory.failure is None]
        scoring = self._rewards.group(len(whole))

        async def score(place: int, trajectory: Trajectory) -> Score:
            sample = sample_of(
                opened.prompt,
                trajectory.text,
                opened.blobs,
                "length" if trajectory.turns[-1].finish_reason is FinishReason.LENGTH else "stop",
                num_tokens=trajectory.length,
                max_tokens=opened.ticket.sampling.max_new_tokens,
            )
            return await scoring.score(place, sample)

        scores = await asyncio.gather(*(score(place, trajectory) for place, trajectory in enumerate(whole)))
        return {trajectory.index: score for trajectory, score in zip(whole, scores, strict=True)}

    def _group(
        self,
        opened: _Ticket,
        trajectories: Sequence[Trajectory],
        scores: Mapping[int, Score],
        generated_at: float,
    ) -> Group:
        failed = Score()  # the trajectory says why
        prompt = opened.first.prompt
        shown = [*(opened.opening.images if opened.opening else ()), *(i for t in trajectories for i in t.images)]
        sources = [np.full(trajectory.length, TokenSource.OBSERVATION, np.uint8) for trajectory in trajectories]
        for trajectory, source in zip(trajectories, sources, strict=True):
            for turn in trajectory.turns:
                source[turn.start : turn.end] = TokenSource.POLICY
        opening_grids = prompt.image_grids[len(opened.ticket.prompt.image_hashes) :]
        return Group(
            ticket_id=opened.ticket.ticket_id,
            server_id=self._server_id,
            prompt_ids=prompt.token_ids,
            opening=recorded(opened.opening, opening_grids) if opened.opening else (),
            blobs={content_hash(image): memoryview(image) for image in shown},
            image_grids=prompt.image_grids,
            image_hashes=prompt.image_hashes,
            video_grids=prompt.video_grids if len(prompt.video_grids) else None,
            video_hashes=prompt.video_hashes,
            lengths=np.asarray([trajectory.length for trajectory in trajectories], np.int32),
            token_ids=np.concatenate([piece.token_ids for t in trajectories for piece in t.pieces]),
            source=np.concatenate(sources),
            logprobs=np.concatenate([column for t in trajectories for column in t.logprobs]),
            versions=np.concatenate([column for t in trajectories for column in t.versions]),
            trajectories=tuple(
                t.record(
                    scores.get(t.index, failed),
                    opened.ticket.role(t.index),
                    zero_over_limit=self._environments.zero_over_limit,
                )
                for t in trajectories
            ),
            timings=GroupTimings(
                generate_s=generated_at - opened.started_at,
                reward_s=time.monotonic() - generated_at,
                environment_s=sum(trajectory.environment_s for trajectory in trajectories),
            ),
        )
