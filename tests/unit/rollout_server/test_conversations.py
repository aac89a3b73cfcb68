"""Ends of a conversation, and environments that fail, with an engine that always says the same."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

import pytest
from PIL import Image
from scripted_engine.engine import ScriptedEngine

from asyncrl.config.schema import RunConfig
from asyncrl.environments.image_rule import ImageRule
from asyncrl.environments.interface import Start, png_bytes
from asyncrl.environments.observation import Message, Observation, PastTurn, StepResult
from asyncrl.journal.writer import TicketSlot
from asyncrl.processing.processor import PromptProcessor
from asyncrl.rewards.score import Score
from learner.groups.group_verification import verify_group
from learner.tickets.ticket_writer import TicketWriter
from protocol.messages import Group, TicketFailed, TrajectoryStatus
from protocol.messages.groups import LONGEST_CALL, LONGEST_INFO, MOST_CALLS
from rollout_server.production.environments import Environments
from rollout_server.production.group_producer import GroupProducer
from tests.rigs.pictures import picture

MakeConfig = Callable[..., RunConfig]
SMALL = picture(28, 28)


class NoRewards:
    """Scores everything with 1."""

    def group(self, size: int) -> NoRewards:
        return self

    async def score(self, index: int, sample: Any) -> Score:
        return Score({"short": 1.0}, reward=1.0)


class Play:
    """Answers each turn with the next item: an observation's parts, a StepResult, or an error."""

    def __init__(self, *answers: Any, opening: str = "") -> None:
        self._answers: Iterator[Any] = iter(answers)
        self._opening = opening
        self.closed = 0

    async def reset(self, start: Start) -> Observation | None:
        return Observation((Message("user", (self._opening,)),)) if self._opening else None

    async def step(self, text: str) -> StepResult:
        assert text == "answer 1"
        answer = next(self._answers)
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, StepResult):
            return answer
        return StepResult(Observation((Message("tool", answer),)), reward=0.5)

    async def close(self) -> None:
        self.closed += 1


def converse(make_config: MakeConfig, *plays: Play, tokens: int = 80, **settings: Any) -> Group | TicketFailed:
    """The verified answer to a ticket for one trajectory each of the first plays; the others are for new tries."""
    size = settings.pop("size", len(plays))
    config = make_config(
        environment={
            "name": "some.py:Where",
            "limits": {"turns": 3, "tokens_per_turn": 16, "images": 2},
            "workers": 8,
        },
        data={"max_response_length": tokens},
        rollout={"engine": "scripted", "engine_args": {"text": "answer 1"}},
    )
    processor = PromptProcessor(config.model)
    writer = TicketWriter(config.ticket_settings, processor, (processor.tokenizer.eos_token_id,))
    item = writer.write(TicketSlot(0, 0, version=0, bound=0))
    item = replace(item, ticket=item.ticket.model_copy(update={"group_size": size}))
    rest = iter(plays)

    async def produce() -> Group | TicketFailed:
        engine = cast(Any, ScriptedEngine(config, processor))
        environments = Environments(lambda: next(rest), **settings)
        producer = GroupProducer(engine, cast(Any, NoRewards()), processor, "s", environments)
        blobs = {digest: memoryview(data) for digest, data in item.blobs.items()}
        (answer,) = [answer async for answer in producer.produce([item.ticket], blobs)]
        return answer

    answer = asyncio.run(produce())
    if isinstance(answer, Group):
        checks: dict[str, Any] = {"sender": "s", "version": 0, "vocabulary": 500, "components": ("short",)}
        verify_group(answer, item.ticket, item.measured_of(answer), bridge=item.bridge, **checks)
    assert all(play.closed == 1 for play in plays)
    return answer


DONE = StepResult(None, reward=2.0, done=True)


def test_the_environment_or_a_limit_ends_a_conversation(make_config: MakeConfig) -> None:
    long = "a b c d e f g h " * 20
    group = converse(
        make_config,
        Play(("go on",), DONE),
        Play(("1",), ("2",), ("3",), DONE),
        Play((SMALL,), (SMALL, SMALL), DONE),
        Play((long,), DONE),
    )
    assert isinstance(group, Group)
    records = group.trajectories
    assert [record.limit for record in records] == ["", "turns", "images", "tokens"]
    assert [len(record.turns) for record in records] == [2, 3, 2, 1]
    assert [record.reward for record in records] == [3.5, 2.5, 2.0, 1.5], "rewards of turns, and 1"
    assert [record.status for record in records] == [TrajectoryStatus.FINISHED, *[TrajectoryStatus.TRUNCATED] * 3]
    assert all(not record.turns[-1].observation for record in records), "what does not fit is left out as a whole"


def test_a_limit_may_cost_the_score(make_config: MakeConfig) -> None:
    group = converse(make_config, Play(("1",), ("2",), ("3",)), Play(DONE), zero_over_limit=True)
    assert isinstance(group, Group)
    assert [record.reward for record in group.trajectories] == [0.0, 3.0]


def test_calls_and_facts_are_recorded_and_cost_nothing_where_there_are_none(make_config: MakeConfig) -> None:
    long = json.dumps({"query": "x" * 2000})
    calls = [
        {"name": "search", "arguments": long, "error": "", "kind": "", "seconds": 0.5},
        {"name": "", "arguments": "", "error": "no JSON at position 3 \ud800", "kind": "malformed", "seconds": 0.0},
    ]
    seen = StepResult(Observation((Message("tool", ("1",)),)), info={"calls": calls * 40, "hit": 0.5})
    group = converse(make_config, Play(seen, DONE))
    assert isinstance(group, Group)
    first, second = group.trajectories[0].turns
    assert len(first.calls) == MOST_CALLS
    assert (first.calls[0].name, first.calls[0].error_kind, first.calls[0].seconds) == ("search", "", 0.5)
    assert len(first.calls[0].arguments) == LONGEST_CALL
    assert first.calls[1].error == "no JSON at position 3 \\ud800"
    assert json.loads(first.info) == {"hit": 0.5}
    assert not {"calls", "info"} & second.model_dump().keys(), "not on the wire"
    for info in ({"text": "x" * LONGEST_INFO}, {"hit": float("nan")}, {"hit": object()}):
        group = converse(make_config, Play(StepResult(None, done=True, info=info)))
        assert isinstance(group, Group)
        assert group.trajectories[0].error_kind == "environment_exception"


def test_long_texts_are_cut_and_say_so(make_config: MakeConfig) -> None:
    group = converse(make_config, Play(("1 2 3", "4 5 6"), DONE), text_tokens=5)
    assert isinstance(group, Group)
    (message,) = group.trajectories[0].turns[0].observation
    first, second = (part.text for part in message.content if part.type == "text")
    assert first.startswith("1 2")
    assert "more tokens]" in first + second


def test_what_asyncrl_says_of_a_mistake_is_never_cut(make_config: MakeConfig) -> None:
    """Also beside an author's text in one message, and in place of an image that cannot be shown."""
    ours = "Error: there is no tool 'loook'. Did you mean 'look'? Tools: look, answer"
    rule = ImageRule()
    wide = rule.shown(Observation((Message("tool", ("1 2 3 4 5 6", png_bytes(Image.new("RGB", (900, 1))))),)))[0]
    answers = (Message("tool", (ours,), own=(0,)), Message("tool", ("1 2 3", ours), own=(1,)), *wide.messages)
    for message in answers:
        group = converse(make_config, Play(StepResult(Observation((message,))), DONE), tokens=300, text_tokens=2)
        assert isinstance(group, Group)
        (shown,) = group.trajectories[0].turns[0].observation
        texts = [part.text for part in shown.content if part.type == "text"]
        for number, text in enumerate(texts):
            assert ("[cut:" not in text) == (number in message.own), text
        assert {texts[number] for number in message.own} == {message.parts[number] for number in message.own}


def test_a_failed_environment_is_tried_again_and_then_a_status(make_config: MakeConfig) -> None:
    broken = RuntimeError("broken")
    plays = (Play(("1",), broken), Play(("1",), DONE))
    group = converse(make_config, *plays, size=1, retries=1)
    assert isinstance(group, Group)
    assert (group.trajectories[0].status, group.trajectories[0].reward) == (TrajectoryStatus.FINISHED, 3.5)

    plays = (Play(broken), Play(broken, opening="another"))
    group = converse(make_config, *plays, size=1, retries=1)
    assert isinstance(group, Group)
    (record,) = group.trajectories
    assert (record.status, record.error_kind, record.reward) == ("error", "environment_exception", None)
    assert "broken" in record.error_message


def test_rounds_wait_for_whoever_is_live_and_for_nobody_else(make_config: MakeConfig) -> None:
    """One has three turns, one ends at once, one fails, and one begins anew while the others wait."""
    broken = RuntimeError("broken")
    plays = (
        Play(("1",), ("2",), DONE),
        Play(DONE),
        Play(("1",), broken),
        Play(broken),
        *(Play(broken, opening="another") for _ in range(2)),
    )
    group = converse(make_config, *plays, size=4, retries=1, in_rounds=True)
    assert isinstance(group, Group)
    assert [len(record.turns) for record in group.trajectories] == [3, 1, 2, 1]
    assert [record.status == "error" for record in group.trajectories] == [False, False, True, True]
    alone = converse(make_config, Play(("1",), ("2",), DONE))
    assert isinstance(alone, Group)
    assert alone.token_ids.tolist() == group.token_ids[: group.lengths[0]].tolist()


def test_bad_answers_are_failures_of_the_environment(make_config: MakeConfig, caplog: pytest.LogCaptureFixture) -> None:
    impossible = StepResult(Observation((Message("tool", ("on",)),)), history=(PastTurn(5),))
    nothing = StepResult(None, reward=float("nan"), done=True)
    group = converse(make_config, Play((b"no image",)), Play(nothing), Play(impossible))
    assert isinstance(group, Group)
    kinds = [record.error_kind for record in group.trajectories]
    assert kinds == ["environment_observation", "environment_exception", "environment_observation"]
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert sum("environment_observation: " in line for line in said) == 2
    assert any("the edited history has turn 5" in line for line in said)


def test_an_opening_that_differs_within_a_group_fails_the_ticket(make_config: MakeConfig) -> None:
    answer = converse(make_config, Play(opening="a"), Play(opening="b"))
    assert isinstance(answer, TicketFailed)
    assert "environment_not_repeatable" in answer.error_message


def test_a_group_larger_than_the_room_fails_with_the_setting(make_config: MakeConfig) -> None:
    answer = converse(make_config, size=2, capacity=1)
    assert isinstance(answer, TicketFailed)
    assert "environment.workers" in answer.error_message


def test_an_opening_may_not_make_the_prompt_longer_than_the_limit(make_config: MakeConfig) -> None:
    answer = converse(make_config, Play(opening="a b c " * 100), prompt_tokens=128)
    assert isinstance(answer, TicketFailed)
    assert answer.error_kind == "UserError"
    for part in ("row rl.parquet:", "reset()", "over data.max_prompt_length = 128. Raise the limit"):
        assert part in answer.error_message
    assert isinstance(converse(make_config, Play(DONE, opening="a"), prompt_tokens=128), Group)
