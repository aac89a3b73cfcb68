"""Orders on the trajectories of a group, from the ticket to the batch: greedy rows, demonstrations and hints."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from asyncrl.config.schema import RunConfig
from asyncrl.models.processing import PromptProcessor
from learner.tickets.ticket import ReceivedGroup
from learner.training.batch import Batch, make_batch
from protocol.messages import Ticket, TrajectoryOrder
from tests.rigs.made_up_batch import made_up_batch

MakeConfig = Callable[..., RunConfig]
LENGTHS = [3, 4, 2, 2]
ORDERS = (
    TrajectoryOrder(prefix=(11, 12)),  # a hint
    TrajectoryOrder(),
    TrajectoryOrder(prefix=(13, 1)),  # a demonstration
    TrajectoryOrder(greedy=True),
)
PREFIXES = np.array([1, 1, 0, 0, 0, 0, 0, 1, 1, 0, 0], bool)


def ordered(config: RunConfig, processor: PromptProcessor) -> ReceivedGroup:
    """A group of four trajectories as `ORDERS` has them; the sampled tokens are of version 2, the others of 1."""
    item = made_up_batch(config, processor).received[0]
    ticket = Ticket.model_validate(item.ticket.model_dump() | {"orders": ORDERS})
    ids = np.arange(20, 20 + len(PREFIXES), dtype=np.int32)
    ids[PREFIXES] = [token for order in ORDERS for token in order.prefix]
    columns = {
        "lengths": np.asarray(LENGTHS, np.int32),
        "token_ids": ids,
        "loss_mask": (~PREFIXES).astype(np.uint8),
        "logprobs": np.where(PREFIXES, 0, -1).astype(np.float32),
        "versions": np.where(PREFIXES, 1, 2).astype(np.int32),
    }
    return ReceivedGroup(replace(item.prepared, ticket=ticket), item.group.model_copy(update=columns))


def batch_of(make_config: MakeConfig, *, demonstrations: bool) -> Batch:
    config = make_config(data={"max_prompt_length": 64}, batch={"prompts_per_step": 2, "group_size": 4})
    processor = PromptProcessor(config.model)
    return make_batch([ordered(config, processor)], processor, demonstrations=demonstrations)


def test_a_batch_trains_sampled_tokens_and_demonstrations_only_where_the_method_uses_them(
    make_config: MakeConfig,
) -> None:
    without, used = (batch_of(make_config, demonstrations=wanted) for wanted in (False, True))
    assert without.is_baseline.tolist() == used.is_baseline.tolist() == [False, False, False, True]
    assert without.trained.flat.tolist() == [2, 3, 4, 5, 6]
    assert without.trained.row.tolist() == [0, 1, 1, 1, 1]
    assert not without.expert.any()
    assert used.trained.flat.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8]
    assert used.expert.tolist() == PREFIXES[:9].tolist()
    assert not math.isnan(float(used.scores[3])), "a greedy row is scored"
    assert torch.equal(used.scores, without.scores)


def test_only_sampled_tokens_grow_old(make_config: MakeConfig) -> None:
    batch = batch_of(make_config, demonstrations=True)
    assert batch.received[0].oldest_version == 2
