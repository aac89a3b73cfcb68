"""Orders on the trajectories of a group, from the ticket to the batch: greedy rows, demonstrations and hints."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.config.schema import RunConfig
from asyncrl.journal.writer import TicketSlot
from asyncrl.processing.processor import PromptProcessor
from learner.groups.group_verification import verify_group
from learner.groups.ticket import ReceivedGroup
from learner.tickets.ticket_writer import TicketWriter
from learner.training.batch import Batch, describe_batch, make_batch
from protocol.errors import ProtocolError
from protocol.messages import Ticket, TokenSource, TrajectoryRecord, TrajectoryRequest, TrajectoryStatus, Turn
from tests.rigs.made_up_batch import made_up_batch

MakeConfig = Callable[..., RunConfig]
STOP = 1
LENGTHS = [3, 4, 2, 2]
REQUESTS = (
    TrajectoryRequest(prefix=(11, 12)),  # a hint
    TrajectoryRequest(),
    TrajectoryRequest(prefix=(13, STOP)),  # a demonstration
    TrajectoryRequest(greedy=True),
)
PREFIXES = np.array([1, 1, 0, 0, 0, 0, 0, 1, 1, 0, 0], bool)


def sampled_turn(start: int, end: int) -> tuple[Turn, ...]:
    return (Turn(start=start, end=end),) if start < end else ()


def group_of_requests(config: RunConfig, processor: PromptProcessor) -> ReceivedGroup:
    """A group of four trajectories as `REQUESTS` has them; the sampled tokens are of version 2, the others of 1."""
    item = made_up_batch(config, processor).received[0]
    sampling = item.ticket.sampling.model_copy(update={"stop_token_ids": (STOP,)})
    ticket = Ticket.model_validate(item.ticket.model_dump() | {"requests": REQUESTS, "sampling": sampling})
    ids = np.arange(20, 20 + len(PREFIXES), dtype=np.int32)
    ids[np.cumsum(LENGTHS) - 1] = STOP
    ids[PREFIXES] = [token for asked in REQUESTS for token in asked.prefix]
    columns = {
        "lengths": np.asarray(LENGTHS, np.int32),
        "token_ids": ids,
        "source": np.where(PREFIXES, TokenSource.INSERTED, TokenSource.POLICY).astype(np.uint8),
        "logprobs": np.where(PREFIXES, 0, -1).astype(np.float32),
        "versions": np.where(PREFIXES, 1, 2).astype(np.int32),
    }
    scored = [
        record.model_copy(
            update={
                "rewards": {"exact_match": record.reward},
                "role": ticket.role(index),
                "turns": sampled_turn(len(REQUESTS[index].prefix), LENGTHS[index]),
            }
        )
        for index, record in enumerate(item.group.trajectories)
    ]
    group = item.group.model_copy(update={**columns, "trajectories": tuple(scored)})
    return ReceivedGroup(replace(item.prepared, ticket=ticket), group)


def group_without_requests(config: RunConfig, processor: PromptProcessor) -> ReceivedGroup:
    """That group where all of it was sampled."""
    item = group_of_requests(config, processor)
    ticket = item.ticket.model_copy(update={"requests": ()})
    ends = np.isin(np.arange(len(PREFIXES)), np.cumsum(LENGTHS) - 1)
    columns = {
        "token_ids": np.where(ends, STOP, 20).astype(np.int32),
        "source": np.full(len(PREFIXES), TokenSource.POLICY, np.uint8),
        "versions": np.full(len(PREFIXES), 2, np.int32),
    }
    records = tuple(
        record.model_copy(update={"role": ticket.role(index), "turns": sampled_turn(0, LENGTHS[index])})
        for index, record in enumerate(item.group.trajectories)
    )
    group = item.group.model_copy(update={**columns, "trajectories": records})
    return ReceivedGroup(replace(item.prepared, ticket=ticket), group)


def batch_of(make_config: MakeConfig, *, inserted: bool) -> Batch:
    config = make_config(data={"max_prompt_length": 64}, batch={"prompts_per_step": 2, "group_size": 4})
    processor = PromptProcessor(config.model)
    return make_batch([group_of_requests(config, processor)], processor, inserted=inserted)


def test_a_batch_trains_sampled_tokens_and_demonstrations_only_where_the_method_uses_them(
    make_config: MakeConfig,
) -> None:
    without, used = (batch_of(make_config, inserted=wanted) for wanted in (False, True))
    for batch in (without, used):
        assert batch.provenance.is_baseline.tolist() == [False, False, False, True]
    assert without.trained.flat.tolist() == [2, 3, 4, 5, 6]
    assert without.trained.row.tolist() == [0, 1, 1, 1, 1]
    assert not without.trained_provenance.is_inserted.any()
    assert used.trained.flat.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8]
    assert used.trained_provenance.is_inserted.tolist() == PREFIXES[:9].tolist()
    assert not math.isnan(float(used.scores[3])), "a greedy row is scored"
    assert torch.equal(used.scores, without.scores)


def test_a_group_whose_greedy_row_has_no_score_is_not_trained(make_config: MakeConfig) -> None:
    config = make_config(data={"max_prompt_length": 64}, batch={"prompts_per_step": 2, "group_size": 4})
    processor = PromptProcessor(config.model)
    item = group_of_requests(config, processor)
    *others, greedy = item.group.trajectories
    failed = greedy.model_copy(update={"status": TrajectoryStatus.ERROR, "reward": None})
    broken = replace(item, group=item.group.model_copy(update={"trajectories": (*others, failed)}))
    batch = make_batch([broken, item], processor, inserted=True)
    assert batch.trained.row.unique().tolist() == [4, 5, 6]
    described = describe_batch(batch, 2, "exact_match")
    assert described["baseline/missing"] == 1
    assert described["baseline/reward"] == pytest.approx(greedy.reward)
    assert described["reward/mean"] == pytest.approx(float(batch.scores[[0, 1, 4, 5]].mean()))
    assert (described["tokens"], described["response_length/max"]) == (14, 4)
    assert (described["rows/finished"], described["rows/error"]) == (7, 1)


def test_a_ticket_requests_a_greedy_row_for_an_estimator_that_needs_one(make_config: MakeConfig) -> None:
    config = make_config(data={"max_prompt_length": 64}, algorithm={"adv_estimator": "remax"})
    writer = TicketWriter(config.ticket_settings, PromptProcessor(config.model), (STOP,))
    slot = TicketSlot(7, 3, version=2, bound=1)
    ticket = writer.write(slot).ticket
    assert ticket.group_size == config.batch.group_size + 1 == config.trajectories_per_group
    assert [asked.greedy for asked in ticket.requests] == [False] * config.batch.group_size + [True]
    assert ticket == writer.write(slot).ticket
    plain = TicketWriter(
        make_config(data={"max_prompt_length": 64}).ticket_settings, PromptProcessor(config.model), (STOP,)
    )
    assert (ticket.seed, plain.write(slot).ticket.requests) == (plain.write(slot).ticket.seed, ())


def test_only_sampled_tokens_grow_old(make_config: MakeConfig) -> None:
    batch = batch_of(make_config, inserted=True)
    assert batch.received[0].oldest_version == 2


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "another token": ({"token_ids": {1: 99}}, "completion 0 does not begin with the 2 token ids"),
    "trained": ({"source": {8: TokenSource.POLICY}}, "completion 2 has other sources than 2 inserted tokens"),
    "inserted": ({"source": {4: TokenSource.INSERTED}}, "completion 1 has other sources than 0 inserted tokens"),
    "observed": ({"source": {4: TokenSource.OBSERVATION}}, "completion 1 has other sources than 0 inserted tokens"),
    "a log-prob": ({"logprobs": {0: -0.5}}, "completion 0 has a log-prob"),
    "a longer demonstration": ({"lengths": {1: 3, 2: 3}}, "completion 2"),
    "nothing behind a hint": ({"lengths": {0: 2, 1: 5}}, "completion 0 has 2 tokens, .* something must be sampled"),
    "a shorter hint": ({"lengths": {0: 1, 1: 6}}, "completion 0 does not begin"),
}


WRONG_RECORDS: dict[str, tuple[int, dict[str, Any], str]] = {
    "a turn over a part": (1, {"turns": (Turn(start=1, end=4),)}, r"1 has the turn \[1, 4\), .* tokens are \[0, 4\)"),
    "a turn over a hint": (0, {"turns": (Turn(start=0, end=3),)}, r"0 has the turn \[0, 3\), .* tokens are \[2, 3\)"),
    "a turn without an end": (3, {"turns": (Turn(start=0, end=0),)}, "3 has the turn"),
    "no turn": (1, {"turns": ()}, r"1 has the turn none, .* are \[0, 4\)"),
    "a turn of a demonstration": (2, {"turns": (Turn(start=0, end=2),)}, "2 has the turn"),
    "a turn's reward": (1, {"turns": (Turn(start=0, end=4, reward=9.0),)}, "1 has the turn"),
    "a turn's state": (1, {"turns": (Turn(start=0, end=4, state_key="ab"),)}, "1 has the turn"),
    "a foreign image": (1, {"image_hashes": ("0" * 64,)}, "saw other images for completion 1"),
    "a foreign component": (
        1,
        {"status": "error", "reward": None, "error_kind": "reward_nan", "rewards": {"mine": 1.0}},
        "trajectory 1 has the reward components mine",
    ),
}


@pytest.mark.parametrize(
    ("name", "asked"),
    [(name, asked) for name, (index, *_) in WRONG_RECORDS.items() for asked in (True, False) if asked or index == 1],
)
def test_a_record_that_does_not_fit_its_tokens_is_refused(make_config: MakeConfig, name: str, asked: bool) -> None:
    """With requests and without: their records are compared, too."""
    index, changes, reason = WRONG_RECORDS[name]
    config = make_config(data={"max_prompt_length": 64}, batch={"prompts_per_step": 2, "group_size": 4})
    processor = PromptProcessor(config.model)
    item = group_of_requests(config, processor) if asked else group_without_requests(config, processor)
    sampling = item.ticket.sampling.model_copy(update={"max_new_tokens": 9})
    ticket = Ticket.model_validate(item.ticket.model_dump() | {"sampling": sampling})
    facts = {"sender": "s", "version": 2, "vocabulary": len(processor.tokenizer), "components": ("exact_match",)}
    assert item.prepared.measured is not None
    verify_group(item.group, ticket, item.prepared.measured, **facts)
    records = list(item.group.trajectories)
    records[index] = TrajectoryRecord.model_validate({**dict(records[index]), **changes})
    with pytest.raises(ProtocolError, match=reason):
        verify_group(
            item.group.model_copy(update={"trajectories": tuple(records)}), ticket, item.prepared.measured, **facts
        )


@pytest.mark.parametrize("name", ["", *WRONG])
def test_a_group_that_does_not_follow_its_requests_is_refused(make_config: MakeConfig, name: str) -> None:
    config = make_config(data={"max_prompt_length": 64}, batch={"prompts_per_step": 2, "group_size": 4})
    processor = PromptProcessor(config.model)
    item = group_of_requests(config, processor)
    changes, reason = WRONG.get(name, ({}, ""))
    columns = {}
    for column, values in changes.items():
        columns[column] = getattr(item.group, column).copy()
        columns[column][list(values)] = list(values.values())
    group = item.group.model_copy(update=columns)
    vocabulary = len(processor.tokenizer)
    arguments = {"sender": "s", "version": 2, "vocabulary": vocabulary, "components": ("exact_match",)}
    ticket = Ticket.model_validate(
        item.ticket.model_dump() | {"sampling": item.ticket.sampling.model_copy(update={"max_new_tokens": 9})}
    )
    check = functools.partial(verify_group, group, ticket, item.prepared.measured, **arguments)
    if name:
        with pytest.raises(ProtocolError, match=reason):
            check()
    else:
        check()
