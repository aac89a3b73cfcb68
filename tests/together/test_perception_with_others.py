"""Distorted and masked images beside demonstrations, and under ZeRO."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from asyncrl.config.schema import RunConfig
from asyncrl.journal.writer import TicketSlot
from asyncrl.processing.processor import PromptProcessor
from learner.tickets.ticket_writer import TicketWriter
from learner.training.roles import Roles
from learner.training.step import LearnerStep
from tests.plugins.perception.test_noisy_rollout import NOISY
from tests.plugins.perception.test_papo_on_ranks import check_two_ranks
from tests.rigs.made_up_batch import KeepGradients, made_up_batch
from tests.rigs.zero import HAS_ZERO

MakeConfig = Callable[..., RunConfig]


def test_a_share_is_of_the_completions_that_are_sampled(make_config: MakeConfig) -> None:
    with pytest.raises(ValueError, match=r"share is 0.3, which is none of the 3 completions of a group"):
        make_config(algorithm={"policy_loss": "luffy", "noisy_rollout": {"share": 0.3}})


def test_a_group_may_have_noise_and_a_demonstration(make_config: MakeConfig) -> None:
    """The demonstration is nobody's sample: it sees no image, and the noisy ones stand before it."""
    config = make_config(
        **NOISY | {"algorithm": {"policy_loss": "luffy", "noisy_rollout": {"share": 0.7, "steps": 900}}}
    )
    processor = PromptProcessor(config.model)
    writer = TicketWriter(config.ticket_settings, processor, (1,))
    requests = writer.write(TicketSlot(0, 0, version=0, bound=0)).ticket.requests
    assert [bool(order.images) for order in requests] == [False, True, True, False]
    assert [bool(order.prefix) for order in requests] == [False, False, False, True]
    batch = made_up_batch(config, processor)
    assert batch.provenance.saw_other_images.tolist() == [False, True, True, False] * 2
    assert not (batch.trained_provenance.lacks_behaviour & batch.trained_provenance.is_inserted).any()
    actor = KeepGradients(config.model_settings, config.learner.optim, 1)
    actor.prepare()
    results: list[dict[str, float]] = []
    for shift in (0.0, 3.0):
        moved = batch.behaviour_logprobs.clone()
        moved[batch.trained.flat[batch.trained_provenance.lacks_behaviour | batch.trained_provenance.is_inserted]] -= (
            shift
        )
        results.append(LearnerStep(Roles(actor), config.step_settings)(replace(batch, behaviour_logprobs=moved), 0))
    assert results[0] == results[1]
    assert results[0]["inserted/tokens"] > 0


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.skipif(not HAS_ZERO, reason="deepspeed is not installed")
def test_steps_with_masked_images_under_zero_are_the_steps_of_one_process(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    check_two_ranks(make_config, tmp_path, "deepspeed")
