"""Rows of the index from the journal alone: of groups that no step has written there (yet)."""

from __future__ import annotations

from asyncrl.journal.reader import JournalReader
from asyncrl.journal.sample_rows import IndexedGroup, PromptText, index_group
from asyncrl.journal.writer import TicketSlot
from asyncrl.tools.samples.dataset import RunRows
from asyncrl.tools.samples.texts import TokenTexts
from protocol.messages import Group


def index_journaled(
    journal: JournalReader, texts: TokenTexts, slot: TicketSlot, step: int | None, version: int
) -> IndexedGroup | None:
    """None where the group is not kept any more. The prompt's text is that of its tokens: rows cost time."""
    group = journal.find_group(slot.ticket_id)
    if group is None:
        return None
    return index_group(group, prompt_of_tokens(group, texts), step=step, version=version)


def prompt_of_tokens(group: Group, texts: TokenTexts) -> PromptText:
    """As far as tokens tell: one text, without row, answer and roles."""
    text = texts.plain(group.prompt_ids).strip()
    videos = () if group.video_grids is None else tuple(("", int(grid[0])) for grid in group.video_grids)
    return PromptText("", ({"role": "prompt", "content": text},), "", group.image_hashes, videos)


def prompt_of_row(group: Group, texts: TokenTexts, rows: RunRows, position: int) -> PromptText | None:
    """The row at the position in the data order, if it is still the one that the group was sampled from."""
    row = rows.row_at(position)
    rendered = None if row is None else rows.prompt(row)
    if rendered is None:
        return None
    said = [part.text for part in rendered.prompt.messages[-1].content if part.type == "text"]
    sampled = texts.plain(group.prompt_ids)
    is_same = rendered.prompt.image_hashes == group.image_hashes and all(text.strip() in sampled for text in said)
    return PromptText.of(rendered.prompt) if is_same else None
