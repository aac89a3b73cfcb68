"""Dataset rows become tickets: the learner owns the data order."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np

from asyncrl.config.schema import RunConfig
from asyncrl.data.dataset import RowSource, open_dataset
from asyncrl.data.order import DataOrder
from asyncrl.data.prompts import PromptRenderer
from asyncrl.errors import UserError
from asyncrl.models.processing import PromptProcessor, check_prompt_length
from protocol.messages import Prompt, Sampling, Ticket, TicketKind

logger = logging.getLogger(__name__)

EVALUATION_IDS = 2**40
"""Evaluation tickets are numbered from here; training tickets are positions in the data order."""


class TicketWriter:
    """Writes the ticket of any id. The same id always gives the same prompt and the same seed."""

    def __init__(self, config: RunConfig, processor: PromptProcessor, stop_token_ids: tuple[int, ...]):
        self.config = config
        self.processor = processor
        self.renderer = PromptRenderer(config.data)
        self.train = open_dataset(config.data.train_files, config.data, max_rows=config.data.max_train_rows)
        self.held_out = (
            open_dataset(config.data.val_files, config.data, max_rows=config.data.max_val_rows)
            if config.data.val_files
            else None
        )
        self._stop_token_ids = stop_token_ids
        self._usable = self._find_usable_rows()
        self._order = DataOrder(len(self._usable), config.trainer.seed, config.data.shuffle)

    @property
    def num_train_rows(self) -> int:
        return len(self._usable)

    def _find_usable_rows(self) -> list[int]:
        """With filter_overlong_prompts, the rows within the limit; else all, and an overlong one stops the run."""
        rows = list(range(len(self.train)))
        if not self.config.data.filter_overlong_prompts:
            return rows
        usable: list[int] = []
        for index in rows:
            prompt, blobs = self._prompt(self.train, index)
            if len(self.processor.encode(prompt, blobs).token_ids) <= self.config.data.max_prompt_length:
                usable.append(index)
            else:
                logger.warning("row %s is over data.max_prompt_length and left out", prompt.row_id)
        logger.info("%d of %d training rows are within data.max_prompt_length", len(usable), len(rows))
        if not usable:
            raise UserError(
                f"all {len(rows)} training prompts are over data.max_prompt_length = "
                f"{self.config.data.max_prompt_length}. Raise it"
            )
        return usable

    def _prompt(self, rows: RowSource, index: int) -> tuple[Prompt, Mapping[str, bytes]]:
        rendered = self.renderer.render(rows[index], rows.row_id(index))
        return rendered.prompt, rendered.blobs

    def write(self, ticket_id: int, version: int) -> Ticket:
        """The training ticket of a position in the data order."""
        index = self._usable[self._order.row_at(ticket_id)]
        prompt, blobs = self._prompt(self.train, index)
        check_prompt_length(self.processor.encode(prompt, blobs), self.config.data.max_prompt_length)
        return Ticket(
            ticket_id=ticket_id,
            kind=TicketKind.TRAIN,
            prompt=prompt,
            group_size=self.config.batch.group_size,
            seed=self._seed(ticket_id),
            min_version=version,
            sampling=self._sampling(self.config.rollout.temperature),
        )

    def write_evaluation(self, index: int, version: int) -> Ticket:
        """The ticket of one held-out row. Its seed does not depend on the version: evaluations are comparable."""
        assert self.held_out is not None
        prompt, blobs = self._prompt(self.held_out, index)
        check_prompt_length(self.processor.encode(prompt, blobs), self.config.data.max_prompt_length)
        return Ticket(
            ticket_id=EVALUATION_IDS + index,
            kind=TicketKind.EVAL,
            prompt=prompt,
            group_size=self.config.evaluation.group_size,
            seed=self._seed(EVALUATION_IDS + index),
            min_version=version,
            sampling=self._sampling(self.config.evaluation.temperature),
        )

    def blobs(self, ticket: Ticket) -> Mapping[str, bytes]:
        """The encoded images of a ticket, read again from the dataset: nobody holds them while it is out."""
        if ticket.kind is TicketKind.TRAIN:
            return self._prompt(self.train, self._usable[self._order.row_at(ticket.ticket_id)])[1]
        assert self.held_out is not None
        return self._prompt(self.held_out, ticket.ticket_id - EVALUATION_IDS)[1]

    def _sampling(self, temperature: float) -> Sampling:
        return Sampling(
            temperature=temperature,
            max_new_tokens=self.config.data.max_response_length,
            stop_token_ids=self._stop_token_ids,
            banned_token_ids=self.processor.placeholder_ids,
        )

    def _seed(self, ticket_id: int) -> int:
        state: Any = np.random.SeedSequence((self.config.trainer.seed, ticket_id)).generate_state(1, np.uint64)
        return int(state[0]) >> 1  # 63 bits fit every reader's integers
