"""Requests for demonstrations and hints: the rows of `data.target_key` that a group's trajectories are, or begin with.

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

from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.demonstrations import DemonstrationConfig
from asyncrl.data.survey.row_survey import RowSurvey
from asyncrl.errors import UserError
from asyncrl.journal.writer import TicketSlot
from asyncrl.processing.processor import PromptProcessor
from protocol.messages import TrajectoryRequest

logger = logging.getLogger(__name__)

SENTENCE_END = re.compile(r"(?<=[.!?。！？])\s+|\n+")
WORD_END = re.compile(r"\s+")
_SEED = 0x4445
"""Seed beside the run's seed and the ticket's number: the draws of requests are not those of sampling."""


class Demonstrations:
    """Requests for the groups of a run. The same slot and text always give the same ones."""

    def __init__(
        self,
        config: DemonstrationConfig,
        processor: PromptProcessor,
        stop_token_ids: tuple[int, ...],
        *,
        seed: int,
        most_tokens: int,
    ):
        self._config = config
        self._seed = seed
        self._limit = most_tokens
        self._processor = processor
        self._never_inside = {*stop_token_ids, *processor.placeholder_ids}
        self._has_warned = False

    def token_ids(self, text: str) -> tuple[int, ...] | None:
        """The demonstration as a whole completion, its stop token included. None where there is no text, or it cannot
        be a completion: it is over data.max_response_length, or has stop tokens or placeholders of media inside."""
        if not text:
            return None
        ids = self._processor.tokenize_demonstration(text)
        if len(ids) <= self._limit and not self._never_inside & {*ids[:-1]}:
            return tuple(ids)
        if not self._has_warned:
            self._has_warned = True
            said = "a demonstration of %d tokens cannot be a completion, and others may not be, either: %.60r. It has "
            said += "over data.max_response_length (%d) tokens, or stop tokens or placeholders of media in it"
            logger.warning(said, len(ids), text, self._limit)
        return None

    def requests(self, text: str, slot: TicketSlot, size: int) -> tuple[TrajectoryRequest, ...]:
        """Requests for a group of `size`: hints first, demonstrations last. Empty where it has neither."""
        demonstration = self.token_ids(text) if self._config.are_used else None
        if demonstration is None:
            return ()
        rng = np.random.default_rng((_SEED, self._seed, slot.ticket_id))
        if rng.random() >= self._config.share:
            return ()
        whole = min(self._config.rows, size)
        hints = self._hints(text, demonstration, slot.version, size - whole, rng)
        requests = (*hints, *[TrajectoryRequest(prefix=demonstration)] * whole)
        return requests if any(request.prefix for request in requests) else ()

    def _hints(
        self, text: str, demonstration: tuple[int, ...], version: int, number: int, rng: np.random.Generator
    ) -> list[TrajectoryRequest]:
        """Hints of j of the L segments, j ~ Binomial(L, p): one draw for each trajectory (UFT, arXiv 2505.16984)."""
        p = self._config.hints.probability(version)
        if not self._config.hints.segments or not p:
            return [TrajectoryRequest()] * number
        ends = segment_ends(text, self._config.hints.segments)
        starts = np.asarray(self._processor.starts_of_tokens(text))
        drawn = rng.binomial(len(ends), p, size=number).tolist()
        lengths = [int((starts < ends[j - 1]).sum()) if j else 0 for j in drawn]
        return [TrajectoryRequest(prefix=demonstration[:length]) for length in lengths]


def check_targets(survey: RowSurvey, algorithm: AlgorithmConfig, key: str) -> None:
    """Raise UserError if demonstrations are to be used and no training row has one; count those that have none."""
    without, usable = survey.num_without_target, len(survey.usable)
    if not algorithm.demonstrations.are_used or not without:
        return
    if without == usable:
        raise UserError(
            f"algorithm.policy_loss {algorithm.policy_loss} learns from demonstrations, and none of {usable:,} "
            f"training rows has one: column {key!r} (data.target_key) is missing or empty. Name the column that has "
            "them, or choose a loss that needs none"
        )
    said = "%d of %d training rows have no demonstration in column %r (data.target_key): their groups are sampled alone"
    logger.warning(said, without, usable, key)


def segment_ends(text: str, most: int) -> list[int]:
    """Places in the text where its segments end, at most so many, of about as many sentences or words each."""
    for boundary in (SENTENCE_END, WORD_END):
        found = [match.start() for match in boundary.finditer(text) if match.start()]
        ends = [*(end for end in found if text[end:].strip()), len(text)]
        if len(ends) > 1:
            break
    number = min(most, len(ends))
    return [ends[round(len(ends) * (i + 1) / number) - 1] for i in range(number)]
