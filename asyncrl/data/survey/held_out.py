"""Held-out rows and their tickets: what an evaluation asks of a policy, during a run and by `asyncrl eval`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from asyncrl.config.environment import EnvironmentConfig, LimitsConfig
from asyncrl.config.run_sections import EvaluationConfig
from asyncrl.config.sections import DataConfig, Purpose
from asyncrl.data.dataset import open_validation
from asyncrl.data.prompts import RenderedPrompt
from asyncrl.data.survey.row_survey import PromptRows
from asyncrl.errors import UserError
from asyncrl.processing.processor import PromptProcessor
from protocol.messages import ConversationLimits, Prompt, Sampling, Ticket, TicketKind

EVALUATION_IDS = 2**40
"""Evaluation tickets are numbered from here; training tickets from 0."""


def held_out_prompts(
    data: DataConfig, processor: PromptProcessor, max_message_mib: int, purpose: Purpose = "rl"
) -> tuple[int, Iterator[RenderedPrompt]]:
    """Number of usable held-out rows, and their prompts, each made when it is asked for. Raises UserError."""
    held_out = open_validation(data, purpose)
    if held_out is None:
        raise UserError("data.val_files is empty: there is nothing to evaluate on")
    rows = PromptRows(held_out, data, processor, max_message_mib, "held-out")
    usable = rows.usable().usable
    return len(usable), map(rows.render, usable)


def evaluation_ticket(
    evaluation: EvaluationConfig,
    environment: EnvironmentConfig,
    prompt: Prompt,
    index: int,
    *,
    ticket_id: int,
    version: int,
    run_seed: int,
    max_response_length: int,
    stop_token_ids: tuple[int, ...],
    banned_token_ids: tuple[int, ...],
) -> Ticket:
    """The ticket of the `index`-th usable held-out row. Its seed depends on neither policy nor version: evaluations are
    comparable."""
    return Ticket(
        ticket_id=ticket_id,
        kind=TicketKind.EVAL,
        prompt=prompt,
        group_size=evaluation.group_size,
        seed=ticket_seed(run_seed, EVALUATION_IDS + index),
        min_version=version,
        sampling=Sampling(
            temperature=evaluation.temperature,
            max_new_tokens=evaluation.limits.tokens or max_response_length,
            stop_token_ids=stop_token_ids,
            banned_token_ids=banned_token_ids,
        ),
        conversation=conversation_limits(environment, evaluation.limits.over(environment.limits)),
    )


def conversation_limits(environment: EnvironmentConfig, limits: LimitsConfig) -> ConversationLimits | None:
    """The rules of a trajectory of several turns, within these limits; None where nobody answers."""
    if not environment.is_used:
        return None
    return ConversationLimits(
        turns=limits.turns,
        tokens_per_turn=limits.tokens_per_turn,
        images=limits.images,
        history=environment.history,
        keep_images=environment.keep_images,
    )


def ticket_seed(run_seed: int, number: int) -> int:
    """63 bits from the run's seed and the ticket's number."""
    state: Any = np.random.SeedSequence((run_seed, number)).generate_state(1, np.uint64)
    return int(state[0]) >> 1
