"""The ticket writer: dataset rows become tickets, in the data order that the learner owns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import isfinite
from typing import Any

import numpy as np

from asyncrl.config.part_settings import TicketSettings
from asyncrl.config.sections import CurriculumConfig
from asyncrl.data.dataset import open_train, open_validation
from asyncrl.data.images import content_hash
from asyncrl.data.prompt_sources import DataOrder
from asyncrl.data.prompts import RenderedPrompt
from asyncrl.data.survey.held_out import EVALUATION_IDS, conversation_limits, evaluation_ticket, ticket_seed
from asyncrl.data.survey.row_survey import BadRow, PromptRows, check_message, facts_of
from asyncrl.errors import UserError
from asyncrl.journal.writer import TicketSlot
from asyncrl.processing.bridge import TurnBridge
from asyncrl.processing.encoded_prompt import EncodedPrompt
from asyncrl.processing.processor import PromptProcessor
from asyncrl.rewards.score import labels_by
from learner.groups.ticket import PreparedTicket
from learner.tickets.ticket_hook import TicketContext, TicketRow, ticket_hooks
from protocol.messages import NO_REQUEST, Sampling, Ticket, TicketKind, TrajectoryRequest

USABLE, PROMPTS, ANSWERS, HELD_OUT = (
    f"fingerprint of the {rows}"
    for rows in ("usable rows", "training prompts", "training rows' answers and columns", "held-out rows")
)
PARITY_IDS = 2**62
"""Parity tickets are numbered from here."""
PARITY_TOKENS = 16
"""Largest number of tokens of a parity ticket's completion."""
PARITY_CANDIDATES = 64
"""Number of training rows from which those with images or videos are chosen."""
COMPARED_ROWS = 8
"""Number of rows whose completions tell policies apart."""


class TicketWriter:
    """Writes tickets. The same slot always gives the same prompt and the same seed."""

    def __init__(self, settings: TicketSettings, processor: PromptProcessor, stop_token_ids: tuple[int, ...]):
        self.settings = settings
        self.processor = processor
        self._stop_token_ids = stop_token_ids
        self._bridge = TurnBridge(processor, stop_token_ids) if settings.environment.is_used else None
        data, most_mib = settings.data, settings.max_message_mib
        self.train = PromptRows(open_train(data, settings.purpose), data, processor, most_mib)
        self.train_survey = self.train.usable()
        held_out = open_validation(data, settings.purpose)
        self.held_out = PromptRows(held_out, data, processor, most_mib, "held-out") if held_out else None
        self.held_out_survey = self.held_out.usable() if self.held_out else None
        context = TicketContext(settings.data, processor, stop_token_ids, self.train_survey)
        self._hooks = ticket_hooks(settings.algorithm, context)
        self._train_rows = self.train_survey.usable
        self._held_out_rows = self.held_out_survey.usable if self.held_out_survey else []
        self.held_out_labels = self._labels(settings.evaluation.by) if settings.evaluation.by else []
        """`evaluation.by` and its value for each usable held-out row; none without it."""
        self._sort_by = self._numbers(settings.data.curriculum) if settings.data.curriculum.order_by else None
        self._order = self.order()

    def _labels(self, column: str) -> list[str]:
        """Raises UserError where no held-out row has the column, or it has too many values."""
        if self.held_out is None:
            return []
        values = self.held_out.rows.column(column)
        return labels_by(column, [values[row] for row in self._held_out_rows], "evaluation.by")

    def order(self) -> DataOrder:
        """The order of the usable rows, an object for one thread."""
        return DataOrder(len(self._train_rows), self.settings.seed, self.settings.data.shuffle, self._sort_by)

    def _numbers(self, curriculum: CurriculumConfig) -> list[float]:
        """The number of each usable row by which they are ordered. Raises UserError naming a row that has none."""
        column = self.train.rows.column(curriculum.order_by)
        numbers: list[float] = []
        for row in self._train_rows:
            number = column[row]
            if isinstance(number, bool) or not isinstance(number, int | float) or not isfinite(number):
                raise UserError(
                    f"row {self.train.rows.row_id(row)}: {number!r} in column {curriculum.order_by!r} "
                    "(data.curriculum.order_by) is no number. Give every row one, or leave the row out"
                )
            numbers.append(-number if curriculum.descending else number)
        return numbers

    @property
    def num_train_rows(self) -> int:
        return len(self._train_rows)

    @property
    def num_held_out_rows(self) -> int:
        return len(self._held_out_rows)

    @property
    def num_held_out_trained(self) -> int:
        """Number of held-out prompts that are trained on, too; 0 with an environment, which tells equal rows apart."""
        if self.held_out_survey is None or self.settings.environment.is_used:
            return 0
        return len(self.held_out_survey.shared_with(self.train_survey))

    @property
    def bad_rows(self) -> list[BadRow]:
        """Rows of both sources that are left out."""
        return [*self.train_survey.bad, *(self.held_out_survey.bad if self.held_out_survey else [])]

    def _measure(self, rows: PromptRows, index: int) -> tuple[RenderedPrompt, EncodedPrompt]:
        """Make a usable row a prompt. Raises UserError if it is not the row any more that the survey has seen."""
        try:
            rendered, measured = rows.measure(index)
        except UserError as error:
            raise UserError(f"{error} (it was usable when the run began: the data must not change under it)") from error
        survey = self.train_survey if rows is self.train else self.held_out_survey
        seen, now = survey.facts[index] if survey else None, facts_of(rendered, measured)
        if seen != now:
            other = "its answer or another column" if seen and seen.prompt == now.prompt else "its prompt or an image"
            raise UserError(
                f"row {rendered.prompt.row_id}: {other} is not what it was when the run began: the data must not "
                "change under it. Put it back and --resume, or take it as it is with --resume --accept-changes"
            )
        return rendered, measured

    def some_prompts(self) -> list[RenderedPrompt]:
        """Prompts of the first held-out rows, or of training where none are held out, to compare policies by."""
        rows, usable = (self.held_out or self.train), (self._held_out_rows or self._train_rows)
        return [self._measure(rows, index)[0] for index in usable[:COMPARED_ROWS]]

    def fingerprints(self) -> dict[str, str]:
        """Hashes of all usable rows, by what they are of."""
        held_out = self.held_out_survey.fingerprint("index", "prompt", "rest") if self.held_out_survey else "none"
        return {
            USABLE: self.train_survey.fingerprint("index"),
            PROMPTS: self.train_survey.fingerprint("prompt"),
            ANSWERS: self.train_survey.fingerprint("rest"),
            HELD_OUT: held_out,
        }

    def write(self, slot: TicketSlot) -> PreparedTicket:
        """Write the training ticket of a position in the data order."""
        rendered, measured = self._measure(self.train, self._train_rows[self._order.row_at(slot.position)])
        requests, other_images = self._requests(rendered, slot)
        if other_images:
            rendered = replace(rendered, blobs={**rendered.blobs, **other_images})
            check_message(rendered, self.settings.max_message_mib)
        size, most_tokens = self.settings.trajectories_per_group, self.settings.data.max_response_length
        return self._prepare((rendered, measured), slot, TicketKind.TRAIN, size, most_tokens, requests)

    def _requests(
        self, rendered: RenderedPrompt, slot: TicketSlot
    ) -> tuple[tuple[TrajectoryRequest, ...], dict[str, bytes]]:
        """Requests for the trajectories of a training group, none where all are sampled alike, and the images in them
        by content hash. A greedy trajectory comes last."""
        row = TicketRow(
            where=f"row {rendered.prompt.row_id}",
            images=[rendered.blobs[digest] for digest in rendered.prompt.image_hashes],
            target=rendered.target,
            trajectories=self.settings.sampled_per_group,
            version=slot.version,
            done=slot.version / self.settings.total_steps(self.num_train_rows),
            seed=(self.settings.seed, slot.ticket_id),
        )
        requests, blobs = [NO_REQUEST] * self.settings.batch.group_size, dict[str, bytes]()
        for hook in self._hooks:
            for index, change in hook(row).items():
                images = {content_hash(data): data for data in change.images}
                hashes = tuple(map(content_hash, change.images))
                said = {name: value for name, value in (("images", hashes), ("prefix", change.prefix)) if value}
                requests[index] = requests[index].model_copy(update=said)
                blobs |= images
        if self.settings.trajectories_per_group > len(requests):
            requests.append(TrajectoryRequest(greedy=True))
        return (tuple(requests) if any(request != NO_REQUEST for request in requests) else ()), blobs

    def write_evaluation(self, index: int, version: int) -> PreparedTicket:
        """Write the ticket of one held-out row. Its seed does not depend on the version: evaluations are comparable."""
        assert self.held_out is not None
        slot = TicketSlot(EVALUATION_IDS + version * self.num_held_out_rows + index, index, version, bound=0)
        rendered, measured = self._measure(self.held_out, self._held_out_rows[index])
        ticket = evaluation_ticket(
            self.settings.evaluation,
            self.settings.environment,
            rendered.prompt,
            index,
            ticket_id=slot.ticket_id,
            version=version,
            run_seed=self.settings.seed,
            max_response_length=self.settings.data.max_response_length,
            stop_token_ids=self._stop_token_ids,
            banned_token_ids=self.processor.placeholder_ids,
        )
        return PreparedTicket(ticket, rendered.blobs, slot, measured, self._bridge)

    def write_parity(self) -> list[PreparedTicket]:
        """Write tickets of a few training rows, those with images or videos first; the same every time."""
        chosen = self._most_telling(self._train_rows[:PARITY_CANDIDATES])[: self.settings.parity_rows]
        slots = [TicketSlot(PARITY_IDS + number, number, version=0, bound=0) for number in range(len(chosen))]
        size = min(2, self.settings.batch.group_size)
        most_tokens = min(PARITY_TOKENS, self.settings.data.max_response_length)
        return [
            self._prepare(self._measure(self.train, row), slot, TicketKind.PARITY, size, most_tokens)
            for row, slot in zip(chosen, slots, strict=True)
        ]

    def _most_telling(self, candidates: Sequence[int]) -> list[int]:
        """Order rows so that those with images, with videos and with both take turns, and text alone comes last."""
        keys = (self.settings.data.image_key, self.settings.data.video_key)
        seen: Counter[tuple[bool, ...]] = Counter()
        order: list[tuple[bool, int, int, int]] = []
        for row in candidates:
            kinds = tuple(_has_media(self.train.rows[row].get(key)) for key in keys)
            order.append((not any(kinds), seen[kinds], -sum(kinds), row))
            seen[kinds] += 1
        return [row for *_, row in sorted(order)]

    def _prepare(
        self,
        prompt: tuple[RenderedPrompt, EncodedPrompt],
        slot: TicketSlot,
        kind: TicketKind,
        size: int,
        max_new_tokens: int,
        requests: tuple[TrajectoryRequest, ...] = (),
    ) -> PreparedTicket:
        rendered, measured = prompt
        settings = self.settings
        ticket = Ticket(
            ticket_id=slot.ticket_id,
            kind=kind,
            prompt=rendered.prompt,
            group_size=size,
            seed=ticket_seed(settings.seed, slot.ticket_id),
            min_version=slot.version,
            sampling=Sampling(
                temperature=settings.rollout.temperature,
                top_p=settings.rollout.top_p,
                top_k=settings.rollout.top_k,
                min_p=settings.rollout.min_p,
                max_new_tokens=max_new_tokens,
                stop_token_ids=self._stop_token_ids,
                banned_token_ids=self.processor.placeholder_ids,
            ),
            requests=requests,
            conversation=None
            if kind is TicketKind.PARITY
            else conversation_limits(settings.environment, settings.environment.limits),
        )
        bridge = self._bridge if ticket.conversation else None
        return PreparedTicket(ticket, rendered.blobs, slot, measured, bridge)


def _has_media(cell: Any) -> bool:
    """Whether a cell of an image or video column holds any: one, or a list of them."""
    return len(cell) > 0 if isinstance(cell, list | tuple | np.ndarray) else cell is not None
