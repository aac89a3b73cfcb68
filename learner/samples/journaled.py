"""Rows of the index from the journal alone: of groups that no step has written there (yet)."""

from __future__ import annotations

import re

import numpy as np

from learner.journal import TicketSlot
from learner.journal_reader import JournalReader
from learner.samples.rows import IndexedGroup, PromptText, index_group
from learner.samples.texts import TokenTexts
from protocol.messages import Group

_BLANK = re.compile(r"\s*\n\s*")


def index_journaled(
    journal: JournalReader, texts: TokenTexts, slot: TicketSlot, step: int | None, version: int
) -> IndexedGroup | None:
    """None where the group is not kept any more. The prompt's text is that of its tokens."""
    group = journal.find_group(slot.ticket_id)
    if group is None:
        return None
    return index_group(group, prompt_of_tokens(group, texts), step=step, version=version)


def prompt_of_tokens(group: Group, texts: TokenTexts) -> PromptText:
    """As far as tokens tell: one text, without row, answer and roles."""
    text = _BLANK.sub("\n", texts.plain(group.prompt_ids)).strip()
    videos = () if group.video_grids is None else tuple(("", int(grid[0])) for grid in np.asarray(group.video_grids))
    return PromptText("", ({"role": "prompt", "content": text},), "", group.image_hashes, videos)
