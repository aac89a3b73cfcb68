"""Dataset rows become tickets: the learner owns the data order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xxhash

from asyncrl.config.schema import RunConfig
from asyncrl.data.dataset import RowSource, open_train, open_validation
from asyncrl.data.order import DataOrder
from asyncrl.data.prompts import PromptRenderer, RenderedPrompt
from asyncrl.journal.writer import TicketSlot
from asyncrl.models.processing import PromptFacts, PromptProcessor, check_prompt_length
from asyncrl.models.prompt_rows import usable_rows
from learner.tickets.ticket import PreparedTicket
from protocol.messages import Sampling, Ticket, TicketKind

FINGERPRINTED_ROWS = 64
"""Spread evenly over the training rows: with large images, reading all of them would take its time."""
EVALUATION_IDS = 2**40
"""Evaluation tickets are numbered from here; training tickets from 0."""
PARITY_IDS = 2**62
"""Parity tickets are numbered from here."""
PARITY_TOKENS = 16
"""Most tokens of a completion that shows whether engine and learner agree."""
PARITY_CANDIDATES = 64
"""Training rows that are looked at for some with images or videos."""


class TicketWriter:
    """Writes tickets. The same slot always gives the same prompt and the same seed."""

    def __init__(self, config: RunConfig, processor: PromptProcessor, stop_token_ids: tuple[int, ...]):
        self.config = config
        self.processor = processor
        self.renderer = PromptRenderer(config.data)
        self.train = open_train(config.data)
        self.held_out = open_validation(config.data)
        self._stop_token_ids = stop_token_ids
        self._train_rows = usable_rows(self.train, self.renderer, processor, config.data)
        self._held_out_rows = self._usable_held_out()
        self._order = DataOrder(len(self._train_rows), config.trainer.seed, config.data.shuffle)

    @property
    def num_train_rows(self) -> int:
        return len(self._train_rows)

    @property
    def num_held_out_rows(self) -> int:
        return len(self._held_out_rows)

    def _usable_held_out(self) -> list[int]:
        if self.held_out is None:
            return []
        return usable_rows(self.held_out, self.renderer, self.processor, self.config.data)

    def _render(self, rows: RowSource, index: int) -> RenderedPrompt:
        return self.renderer.render(rows[index], rows.row_id(index))

    def data_fingerprint(self) -> str:
        """Equal for two sources whose order and prompts are the same, as far as FINGERPRINTED_ROWS rows tell."""
        hashed = xxhash.xxh3_64()
        number = min(self.num_train_rows, FINGERPRINTED_ROWS)
        for place in range(number):
            rendered = self._render(self.train, self._train_rows[place * self.num_train_rows // number])
            hashed.update(rendered.prompt.model_dump_json(include={"messages", "image_hashes"}).encode())
        return hashed.hexdigest()

    def write(self, slot: TicketSlot) -> PreparedTicket:
        """The training ticket of a position in the data order."""
        rendered = self._render(self.train, self._train_rows[self._order.row_at(slot.position)])
        return self._prepare(
            rendered, slot, slot.ticket_id, TicketKind.TRAIN, self.config.batch.group_size, self._distribution
        )

    def write_evaluation(self, index: int, version: int) -> PreparedTicket:
        """The ticket of one held-out row. Its seed does not depend on the version: evaluations are comparable."""
        assert self.held_out is not None
        evaluation = self.config.evaluation
        return self._prepare(
            self._render(self.held_out, self._held_out_rows[index]),
            TicketSlot(EVALUATION_IDS + version * self.num_held_out_rows + index, index, version, bound=0),
            EVALUATION_IDS + index,
            TicketKind.EVAL,
            evaluation.group_size,
            {"temperature": evaluation.temperature},
        )

    def write_parity(self) -> list[PreparedTicket]:
        """Tickets of a few training rows, those with images or videos first; the same every time."""
        chosen = self._most_telling(self._train_rows[:PARITY_CANDIDATES])
        return [
            self._prepare(
                self._render(self.train, row),
                TicketSlot(PARITY_IDS + number, number, version=0, bound=0),
                PARITY_IDS + number,
                TicketKind.PARITY,
                min(2, self.config.batch.group_size),
                self._distribution,
                max_new_tokens=min(PARITY_TOKENS, self.config.data.max_response_length),
            )
            for number, row in enumerate(chosen[: self.config.alignment.rows])
        ]

    def _most_telling(self, candidates: Sequence[int]) -> list[int]:
        """Rows with images, with videos and with both take turns; text alone comes last."""
        keys = (self.config.data.image_key, self.config.data.video_key)
        found: Counter[tuple[bool, ...]] = Counter()
        order: list[tuple[bool, int, int, int]] = []
        for row in candidates:
            kinds = tuple(_length(self.train[row].get(key)) > 0 for key in keys)
            order.append((not any(kinds), found[kinds], -sum(kinds), row))
            found[kinds] += 1
        return [row for *_, row in sorted(order)]

    @property
    def _distribution(self) -> dict[str, Any]:
        """What training samples from."""
        return {name: getattr(self.config.rollout, name) for name in ("temperature", "top_p", "top_k", "min_p")}

    def _prepare(
        self,
        rendered: RenderedPrompt,
        slot: TicketSlot,
        seed: int,
        kind: TicketKind,
        size: int,
        distribution: Mapping[str, Any],
        max_new_tokens: int | None = None,
    ) -> PreparedTicket:
        encoded = self.processor.encode(rendered.prompt, rendered.blobs)
        check_prompt_length(encoded, self.config.data.max_prompt_length)
        ticket = Ticket(
            ticket_id=slot.ticket_id,
            kind=kind,
            prompt=rendered.prompt,
            group_size=size,
            seed=ticket_seed(self.config.trainer.seed, seed),
            min_version=slot.version,
            sampling=Sampling(
                **distribution,
                max_new_tokens=max_new_tokens or self.config.data.max_response_length,
                stop_token_ids=self._stop_token_ids,
                banned_token_ids=self.processor.placeholder_ids,
            ),
        )
        facts = PromptFacts(
            encoded.token_ids,
            encoded.image_grids,
            encoded.image_hashes,
            encoded.video_grids,
            encoded.video_hashes,
        )
        return PreparedTicket(ticket, rendered.blobs, slot, facts)


def _length(value: Any) -> int:
    """Of a cell that holds any number of images or videos."""
    return 0 if value is None else len(value) if isinstance(value, list | tuple | np.ndarray) else 1


def ticket_seed(run_seed: int, number: int) -> int:
    """63 bits from the run's seed and the ticket's number."""
    state: Any = np.random.SeedSequence((run_seed, number)).generate_state(1, np.uint64)
    return int(state[0]) >> 1
