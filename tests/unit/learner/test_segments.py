"""Trajectories whose history was rewritten: the learner makes segments again, and packs them like rows of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any, cast

import numpy as np
import pytest
import torch

from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.schema import RunConfig
from asyncrl.data.images import content_hash
from asyncrl.environments.interface import Start
from asyncrl.environments.observation import Message, Observation, PastTurn, StepResult
from asyncrl.errors import UserError
from asyncrl.journal.data_files import pack_frames, unpack_group
from asyncrl.journal.writer import TicketSlot
from asyncrl.processing.processor import PromptProcessor
from asyncrl.rewards.score import Score
from learner.groups.group_verification import verify_group
from learner.groups.recorded_batch import as_journaled
from learner.groups.ticket import PreparedTicket, ReceivedGroup
from learner.tickets.ticket_writer import TicketWriter
from learner.training.batch import describe_batch, make_batch
from learner.training.roles import Roles
from learner.training.step import LearnerStep
from protocol.codec import Limits, decode, encode
from protocol.errors import ProtocolError
from protocol.messages import Group, TokenSource
from rollout_server.production.environments import Environments
from rollout_server.production.group_producer import GroupProducer
from tests.rigs.made_up_batch import KeepGradients
from tests.rigs.pictures import picture
from tests.rigs.separate_rows import check_packing
from tests.rigs.thinking import ThinkingEngine

pytestmark = pytest.mark.usefixtures("one_thread")
MakeConfig = Callable[..., RunConfig]
PICTURES = [picture(42, 28), picture(28, 56), picture(56, 28)]
SIZE = 4


class Zoom:
    """Shows a picture at the beginning and after each of three turns."""

    def __init__(self) -> None:
        self._turns = 0

    async def reset(self, start: Start) -> Observation:
        return Observation((Message("user", ("look: ", PICTURES[0])),))

    async def step(self, text: str) -> StepResult:
        self._turns += 1
        shown = Observation((Message("tool", (f"part {self._turns} ", PICTURES[self._turns % 3])),))
        return StepResult(shown, 0.25 * self._turns, self._turns == 4, state_key=bytes([self._turns]))

    async def close(self) -> None:
        pass


class Editor(Zoom):
    """Puts a summary in place of the first turns when the third is taken, and shows an image again."""

    async def step(self, text: str) -> StepResult:
        result = await super().step(text)
        if self._turns != 3:
            return result
        again = Observation((Message("tool", ("seen before ", PICTURES[1])), Message("user", ("go on",))))
        return replace(result, history=(PastTurn(None, "answer 1 <|image_pad|>", again), PastTurn(1), PastTurn(2)))


class OfLength:
    """A score for each trajectory: the number of its tokens, odd or even."""

    def group(self, size: int) -> OfLength:
        return self

    async def score(self, index: int, sample: Any) -> Score:
        return Score({"short": sample.num_tokens % 2}, reward=float(sample.num_tokens % 2))


_MADE: dict[str, tuple[RunConfig, PromptProcessor, ReceivedGroup]] = {}


@pytest.fixture(params=["strip", "images", "both", "edit"])
def made(request: pytest.FixtureRequest, make_config: MakeConfig) -> tuple[RunConfig, PromptProcessor, ReceivedGroup]:
    """Configuration, processor and group of each rule, the same for all tests."""
    rule: dict[str, Any] = {"history": "strip_thinking"} if request.param in ("strip", "both") else {}
    rule |= {"keep_images": 1} if request.param in ("images", "both") else {}
    if request.param not in _MADE:
        config = make_config(
            environment={
                "name": "some.py:Where",
                "limits": {"turns": 5, "tokens_per_turn": 32, "images": 4},
                "workers": 8,
                **rule,
            },
            data={"max_response_length": 600},
            batch={"prompts_per_step": 1, "group_size": SIZE, "tokens_per_microbatch": 4096},
            rollout={"engine": "scripted"},
        )
        processor = PromptProcessor(config.model)
        _MADE[request.param] = (
            config,
            processor,
            produced(config, processor, Editor if request.param == "edit" else Zoom),
        )
    return _MADE[request.param]


def produced(config: RunConfig, processor: PromptProcessor, environment: type[Zoom] = Zoom) -> ReceivedGroup:
    writer = TicketWriter(config.ticket_settings, processor, (processor.tokenizer.eos_token_id,))
    item = writer.write(TicketSlot(0, 0, version=0, bound=0))

    async def produce() -> Group:
        producer = GroupProducer(
            cast(Any, ThinkingEngine(config, processor)),
            cast(Any, OfLength()),
            processor,
            "s",
            Environments(environment),
        )
        blobs = {digest: memoryview(data) for digest, data in item.blobs.items()}
        (answer,) = [answer async for answer in producer.produce([item.ticket], blobs)]
        assert isinstance(answer, Group), answer
        return answer

    return ReceivedGroup(item, asyncio.run(produce()))


def verify(prepared: PreparedTicket, group: Group) -> None:
    arguments: dict[str, Any] = {"sender": "s", "version": 0, "vocabulary": 500, "components": ("short",)}
    verify_group(group, prepared.ticket, prepared.measured_of(group), **arguments, bridge=prepared.bridge)


def columns_of(group: Group, name: str, index: int) -> np.ndarray:
    return getattr(group, name)[group.span(index)]


def test_segments_pass_verification_also_after_the_wire_and_the_journal(
    made: tuple[RunConfig, PromptProcessor, ReceivedGroup],
) -> None:
    _, processor, item = made
    verify(item.prepared, item.group)
    travelled = decode(encode(item.group), (Group,), Limits())
    assert isinstance(travelled, Group)
    kept = unpack_group(b"".join(bytes(piece) for piece in pack_frames(encode(travelled))))
    verify(item.prepared, kept)
    assert as_journaled(item.prepared, kept).group.trajectories == item.group.trajectories

    edits = any(turn.history for record in kept.trajectories for turn in record.turns)
    assert max(len(record.segment_starts) for record in kept.trajectories) > (1 if edits else 2)
    rule = item.ticket.conversation
    assert rule is not None
    for index, record in enumerate(kept.trajectories):
        token_ids, source = columns_of(kept, "token_ids", index), columns_of(kept, "source", index)
        assert (source == TokenSource.POLICY).sum() == sum(turn.end - turn.start for turn in record.turns), (
            "a sampled token is trained once"
        )
        said = [processor.decode(token_ids[turn.start : turn.end]) for turn in record.turns]
        for number, (before, turn) in enumerate(pairwise(record.turns)):
            thoughts = ["<think>" in text for text in said[: number + 1]]
            if rule.history == "strip_thinking":
                assert bool(turn.context) or not thoughts[-1]
            if turn.context:
                assert turn.start - turn.context == before.end, "no bridge behind a segment"
                again = processor.decode(token_ids[turn.start - turn.context : turn.start])
                if edits:
                    assert "answer 1 < |image_pad|>" in again
                    continue
                assert ("<think>" in again) == (rule.history == "whole" and any(thoughts))
                assert again.count("image left out") == (number if rule.keep_images else 0)


def test_whole_histories_have_one_segment_and_nothing_more_on_the_wire(make_config: MakeConfig) -> None:
    environment = {"name": "some.py:Where", "limits": {"turns": 5, "tokens_per_turn": 32, "images": 4}, "workers": 8}
    batch = {"prompts_per_step": 1, "group_size": SIZE, "tokens_per_microbatch": 4096}
    config = make_config(
        environment=environment, data={"max_response_length": 600}, batch=batch, rollout={"engine": "scripted"}
    )
    item = produced(config, PromptProcessor(config.model))
    assert {record.segment_starts for record in item.group.trajectories} == {(0,)}
    for header in (encode(item.group)[0], encode(item.ticket)[0]):
        assert not any(name in bytes(header) for name in (b"context", b"history", b"keep_images"))


def with_turn(group: Group, index: int, number: int, **changes: Any) -> Group:
    records = [*group.trajectories]
    turns = [*records[index].turns]
    turns[number] = turns[number].model_copy(update=changes)
    records[index] = records[index].model_copy(update={"turns": tuple(turns)})
    return group.model_copy(update={"trajectories": tuple(records)})


def with_column(group: Group, name: str, place: int, value: float) -> Group:
    column = getattr(group, name).copy()
    column[place] = value
    return group.model_copy(update={name: column})


def rewritten(group: Group) -> tuple[int, int]:
    """Trajectory and number of the last turn with which a segment begins."""
    return next(
        (index, number)
        for index, record in enumerate(group.trajectories)
        for number, turn in reversed([*enumerate(record.turns)])
        if turn.context
    )


def test_a_history_that_was_tampered_with_is_refused(made: tuple[RunConfig, PromptProcessor, ReceivedGroup]) -> None:
    _, _, item = made
    group = item.group
    index, number = rewritten(group)
    turn, start = group.trajectories[index].turns[number], group.span(index).start
    first = start + turn.start - turn.context
    where = f"completion {index}: after turn {number - 1} "
    shown = group.trajectories[index].turns[0].observation[0]
    grown = shown.content[1].model_copy(update={"grid": (1, 8, 8)})
    other = shown.model_copy(update={"content": (shown.content[0], grown)})
    tampered: list[tuple[Group, str]] = [
        (with_column(group, "token_ids", first + 2, 77), where + "stand other tokens than the history as it is rewr"),
        (with_column(group, "token_ids", first + turn.context - 1, 77), where + "stand other tokens than the history"),
        (
            with_turn(group, index, number, context=0),
            where + "no segment begins, and by the ticket's rule and the record a",
        ),
        (with_turn(group, index, number, context=turn.context - 1), where + f"a segment of {turn.context - 1} tokens"),
        (with_turn(group, index, number, start=turn.start + 1), where + "stand other tokens"),
        (
            with_column(group, "source", first + 1, TokenSource.POLICY),
            where + "a token of the observation has another source",
        ),
        (with_column(group, "logprobs", first + 1, -1.0), where + "a token of the observation has another source"),
        (with_column(group, "versions", first + 1, 1), where + "a token of the observation has another version"),
        (with_turn(group, index, 0, context=3, start=3), f"completion {index}: its first turn has a history of 3"),
        (with_turn(group, index, 0, observation=(other,)), f"completion {index}: after turn 0 the image grids differ"),
    ]
    for wrong, reason in tampered:
        with pytest.raises(ProtocolError, match=reason):
            verify(item.prepared, wrong)
    with pytest.raises(UserError, match="stand other tokens than the history as it is rewritten"):
        as_journaled(item.prepared, tampered[0][0])


def test_a_group_by_another_rule_than_its_tickets_is_refused(
    made: tuple[RunConfig, PromptProcessor, ReceivedGroup],
) -> None:
    _, _, item = made
    rule = item.ticket.conversation
    assert rule is not None
    if rule.history == "whole" and not rule.keep_images:
        item = replace(item, group=with_turn(item.group, 0, 2, history=()))
    plain = rule.model_copy(update={"history": "whole", "keep_images": 0})
    prepared = replace(item.prepared, ticket=item.ticket.model_copy(update={"conversation": plain}))
    with pytest.raises(
        ProtocolError, match="tokens of history begins, and by the ticket's rule and the record no segment begins"
    ):
        verify(prepared, item.group)


@pytest.mark.parametrize("made", ["edit"], indirect=True)
def test_an_edited_history_is_checked_as_it_was_recorded(
    made: tuple[RunConfig, PromptProcessor, ReceivedGroup],
) -> None:
    _, _, item = made
    first, *others = item.group.trajectories[0].turns[2].history
    assert [(past.turn, past.shown) for past in others] == [(1, ()), (2, ())], "what stays is not recorded again"
    message = first.shown[0]
    image = message.content[1].model_copy(update={"grid": (1, 2, 2)})
    grown = message.model_copy(update={"content": (message.content[0], image)})
    for history, reason in (
        (
            (first.model_copy(update={"text": "answer 2 <|image_pad|>"}), *others),
            "after turn 2 stand other tokens than the history",
        ),
        ((first.model_copy(update={"shown": first.shown[:1]}), *others), "after turn 2 a segment of .* and by the"),
        (
            (first.model_copy(update={"shown": (grown, *first.shown[1:])}), *others),
            "an edited history has the image .* another grid",
        ),
        ((first, others[1], others[0]), "after turn 2 nothing follows turn 1 of the edited history"),
        ((first, others[0].model_copy(update={"turn": 3}), others[1]), "after turn 2 the edited history has turn 3"),
    ):
        with pytest.raises(ProtocolError, match=reason):
            verify(item.prepared, with_turn(item.group, 0, 2, history=history))
    with pytest.raises(ProtocolError, match="something stands behind its last turn"):
        verify(item.prepared, with_turn(item.group, 0, 3, history=(first,)))


def test_packed_segments_equal_separate_rows(made: tuple[RunConfig, PromptProcessor, ReceivedGroup]) -> None:
    """Log-probs and gradients, with images shown in several segments; parts of a group keep trajectories whole."""
    config, processor, item = made
    batch = make_batch([item], processor)
    (group,) = batch.train_groups
    assert any(len(c.observed) > 1 for c in group.completions)
    assert group.num_tokens == len(group.prompt.token_ids) + len(item.group.token_ids) - sum(
        len(record.segment_starts) for record in item.group.trajectories
    )
    assert check_packing(config, processor, batch, 4096) == 1
    assert check_packing(config, processor, batch, group.num_tokens // 2) > 1


def test_turns_are_those_of_the_records_and_every_sampled_token_learns_once(
    made: tuple[RunConfig, PromptProcessor, ReceivedGroup],
) -> None:
    config, processor, item = made
    batch = make_batch([item], processor)
    records = item.group.trajectories
    lengths = [[turn.end - turn.start for turn in record.turns] for record in records]
    turns = batch.turns(zero_over_limit=False)
    assert turns.turn.tolist() == [n for each in lengths for n, length in enumerate(each) for _ in range(length)]
    assert turns.state.tolist() == turns.turn.tolist()
    ends = np.cumsum([length for each in lengths for length in each]) - 1
    assert turns.turn_rewards.nonzero()[:, 0].tolist() == ends.tolist()
    assert turns.turn_rewards[ends].tolist() == [turn.reward for record in records for turn in record.turns]

    for estimator in ("grpo", "reinforce"):
        algorithm = AlgorithmConfig.model_validate(config.algorithm.model_dump() | {"adv_estimator": estimator})
        engine = KeepTokenGradients(config.model_settings, config.learner.optim, 1)
        engine.prepare()
        step = LearnerStep(Roles(engine), config.model_copy(update={"algorithm": algorithm}).step_settings)
        assert np.isfinite(step(batch, 0)["loss"])
        assert engine.logprobs.grad is not None
        assert len(engine.logprobs) == int(item.group.is_sampled.sum()), "token means divide by sampled tokens"


def test_a_step_says_how_often_histories_were_rewritten(
    made: tuple[RunConfig, PromptProcessor, ReceivedGroup],
) -> None:
    _, processor, item = made
    described = describe_batch(make_batch([item], processor), 0, "short")
    counts = [len(record.segment_starts) for record in item.group.trajectories]
    assert described["env/segments"] == np.mean(counts) > 1


def test_blobs_hold_an_image_once_however_often_it_is_shown(
    made: tuple[RunConfig, PromptProcessor, ReceivedGroup],
) -> None:
    assert made[2].group.blobs.keys() == set(map(content_hash, PICTURES))


class KeepTokenGradients(KeepGradients):
    logprobs: torch.Tensor

    def forward(self, micro_batch: Any, **asked: Any) -> Any:
        outputs = super().forward(micro_batch, **asked)
        if outputs.logprobs.requires_grad:
            outputs.logprobs.retain_grad()
            self.logprobs = outputs.logprobs
        return outputs
