"""Demonstrations and hints in tickets: texts of `data.target_key` that a group's trajectories are, or begin with.

A demonstration travels as every completion does: the rollout server puts it in place, scores it, and sends it back with
its group, to be verified and journaled. So one mechanism serves methods that need its score (LUFFY, SRFT), methods that
go on sampling behind a hint (UFT), and one that decides by the group's other scores whether it is used (HPT). CHORD's
separate buffer of expert rows becomes a demonstration in a share of the groups: the rows of a step are then from the
prompts of that step.
"""

from __future__ import annotations

import logging
import re

import numpy as np

from asyncrl.data.survey.row_survey import RowSurvey
from asyncrl.errors import UserError
from asyncrl_plugins.demonstrations.settings import DemonstrationConfig
from learner.tickets.ticket_hook import TicketContext, TicketRow, TrajectoryChange

logger = logging.getLogger(__name__)

SENTENCE_END = re.compile(r"(?<=[.!?。！？])\s+|\n+")
WORD_END = re.compile(r"\s+")
_SEED = 0x4445
"""Seed beside the run's seed and the ticket's number: these draws are not those of sampling."""


class Demonstrations:
    """Hook of tickets: gives the last trajectories of a group whole, or others their first parts."""

    def __init__(self, settings: DemonstrationConfig, context: TicketContext):
        """Raises UserError where no row has a demonstration; a warning counts the rows without."""
        self._settings = settings
        self._limit = context.data.max_response_length
        self._processor = context.processor
        self._never_inside = {*context.stop_token_ids, *context.processor.placeholder_ids}
        self._has_warned = False
        _check_targets(context.survey, context.data.target_key)

    def __call__(self, row: TicketRow) -> dict[int, TrajectoryChange]:
        demonstration = self.token_ids(row.target)
        if demonstration is None:
            return {}
        rng = np.random.default_rng((_SEED, *row.seed))
        if rng.random() >= self._settings.share:
            return {}
        prefixes = [*self._hints(row, demonstration, rng), *[demonstration] * self._settings.rows]
        return {index: TrajectoryChange(prefix=prefix) for index, prefix in enumerate(prefixes) if prefix}

    def token_ids(self, text: str) -> tuple[int, ...] | None:
        """The demonstration as a whole completion, its stop token included. None where there is no text, or it cannot
        be a completion: it is over data.max_response_length, or has stop tokens or placeholders of media inside."""
        if not text:
            return None
        ids = self._processor.tokenize_completion(text)
        if len(ids) <= self._limit and not self._never_inside & {*ids[:-1]}:
            return tuple(ids)
        if not self._has_warned:
            self._has_warned = True
            said = "a demonstration of %d tokens cannot be a completion, and others may not be, either: %.60r. It has "
            said += "over data.max_response_length (%d) tokens, or stop tokens or placeholders of media in it"
            logger.warning(said, len(ids), text, self._limit)
        return None

    def _hints(self, row: TicketRow, demonstration: tuple[int, ...], rng: np.random.Generator) -> list[tuple[int, ...]]:
        """Hints of j of the L parts, j ~ Binomial(L, p): one draw for each sampled trajectory (UFT, arXiv
        2505.16984)."""
        most, p = self._settings.hints.parts, self._settings.hints.probability(row.version)
        if not most or not p:
            return [()] * row.trajectories
        ends = part_ends(row.target, most)
        starts = np.asarray(self._processor.starts_of_tokens(row.target))
        drawn = rng.binomial(len(ends), p, size=row.trajectories).tolist()
        lengths = [int((starts < ends[j - 1]).sum()) if j else 0 for j in drawn]
        return [demonstration[:length] for length in lengths]


def _check_targets(survey: RowSurvey, key: str) -> None:
    without, usable = survey.num_without_target, len(survey.usable)
    if without == usable:
        raise UserError(
            f"algorithm.demonstrations is chosen, and none of {usable:,} training rows has one: column {key!r} "
            "(data.target_key) is missing or empty. Name the column that has them, or choose a loss that needs none"
        )
    if without:
        said = "%d of %d training rows have no demonstration in column %r (data.target_key): their groups are sampled "
        logger.warning(said + "alone", without, usable, key)


def part_ends(text: str, most: int) -> list[int]:
    """Places in the text where its parts end, at most so many, of about as many sentences or words each."""
    for boundary in (SENTENCE_END, WORD_END):
        found = [match.start() for match in boundary.finditer(text) if match.start()]
        ends = [*(end for end in found if text[end:].strip()), len(text)]
        if len(ends) > 1:
            break
    number = min(most, len(ends))
    return [ends[round(len(ends) * (i + 1) / number) - 1] for i in range(number)]
