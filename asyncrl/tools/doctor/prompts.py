"""Rows as prompts: those that a run would refuse, their lengths, one of them as the model sees it, and twins."""

from __future__ import annotations

import hashlib
import re
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from asyncrl.config.data import DataConfig
from asyncrl.data.dataset import RowSource
from asyncrl.data.prompts import PromptRenderer, RenderedPrompt
from asyncrl.errors import UserError
from asyncrl.models.preview import describe_prompt
from asyncrl.models.processing import EncodedPrompt, PromptProcessor
from asyncrl.tools.doctor.findings import Finding, Findings, split_fix

LOOK_S = 10.0
"""Spent on each data source; small ones are looked at whole."""
Purpose = Literal["training", "held-out"]
_BARS = 8
_BAR_WIDTH = 32
_NAMED = 3
"""Rows of each kind."""
_ROW = re.compile(r"^row \S+?(?=[,:] | has )(, (?:image|video) \d+)?:? ?")


@dataclass
class Look:
    """At the rows of one data source."""

    lengths: dict[str, int] = field(default_factory=dict)
    """Tokens by row."""
    refused: dict[str, list[tuple[str, str]]] = field(default_factory=lambda: defaultdict(list))
    """Rows and messages by what they have in common."""
    texts: set[str] = field(default_factory=set)
    """Rendered prompts."""
    questions: set[str] = field(default_factory=set)
    """What the rows ask, before any template."""
    keys: dict[str, str] = field(default_factory=dict)
    """Row by what the model sees of it."""
    example: tuple[RenderedPrompt, EncodedPrompt] | None = None

    @property
    def seen(self) -> int:
        return len(self.lengths) + sum(map(len, self.refused.values()))


def find_prompts(
    config: DataConfig, rows: RowSource, purpose: Purpose, renderer: PromptRenderer, processor: PromptProcessor
) -> Findings[Look]:
    look = _look_at(config, rows, renderer, processor)
    counted = f"{look.seen:,} of {len(rows):,} {purpose} rows"
    yield Finding(f"{purpose} rows", f"{len(rows):,} with columns {', '.join(rows.columns)}; {counted} looked at")
    if look.example is not None and purpose == "training":
        rendered, encoded = look.example
        lines = describe_prompt(processor, rendered, encoded, config.max_prompt_length)
        yield Finding("example", f"row {rendered.prompt.row_id} as the model sees it", "note", details=tuple(lines))
    for refused in look.refused.values():
        yield _refused(refused, counted)
    if look.lengths:
        yield _too_long(look, config, counted)
    if len(look.texts) == 1 and len(look.questions) > 1:
        value = f"all of {counted} become one and the same prompt, though they ask different things"
        fix = "the template (data.format_prompt, or the model's chat template) has to print `content`"
        yield Finding("template", value, "problem", fix)
    return look


def find_twins(train: Look, held_out: Look) -> Findings[None]:
    """Held-out accuracy says little of rows that are trained on."""
    twins = [(row, train.keys[key]) for key, row in held_out.keys.items() if key in train.keys]
    if not twins:
        value = f"none of {len(held_out.keys):,} held-out prompts is among {len(train.keys):,} of training"
        yield Finding("held-out is apart", value)
        return
    counted = f"{len(twins):,} of {len(held_out.keys):,} held-out prompts"
    value = f"{counted} are trained on, too: {twins[0][0]} is {twins[0][1]}"
    yield Finding("held-out is apart", value, "warning", "take them out of one of data.train_files and data.val_files")


def _look_at(config: DataConfig, rows: RowSource, renderer: PromptRenderer, processor: PromptProcessor) -> Look:
    """The first row, and then others in random order for as long as there is time."""
    look = Look()
    until = time.monotonic() + LOOK_S
    for index in _visits(len(rows)):
        if time.monotonic() > until:
            break
        row_id = rows.row_id(index)
        try:
            row = rows[index]
            rendered = renderer.render(row, row_id)
            encoded = processor.encode(rendered.prompt, rendered.blobs)
        except UserError as error:
            message = _ROW.sub("", str(error))
            look.refused[re.sub(r"\d+|'[^']*'|\S*/\S*", "#", message)].append((row_id, message))
            continue
        look.lengths[row_id] = len(encoded.token_ids)
        text = processor.render(rendered.prompt)
        look.texts.add(text)
        look.questions.add(str(row.get(config.prompt_key)))
        look.keys[_key(text, encoded)] = row_id
        look.example = look.example or (rendered, encoded)
    return look


def _visits(count: int) -> Iterator[int]:
    yield 0
    yield from (index for index in np.random.default_rng(0).permutation(count).tolist() if index)


def _key(text: str, encoded: EncodedPrompt) -> str:
    return hashlib.sha256("\n".join((text, *encoded.image_hashes, *encoded.video_hashes)).encode()).hexdigest()


def _refused(rows: Sequence[tuple[str, str]], counted: str) -> Finding:
    names = ", ".join(row_id for row_id, _ in rows[:_NAMED]) + (", ..." if len(rows) > _NAMED else "")
    reason, fix = split_fix(rows[0][1])
    value = f"{len(rows):,} of {counted} would be refused ({names}): {reason}"
    return Finding("refused rows", value, "problem", fix or "mend these rows or leave them out")


def _too_long(look: Look, config: DataConfig, counted: str) -> Finding:
    """With a histogram."""
    lengths, limit = np.array(list(look.lengths.values())), config.max_prompt_length
    value = (
        f"{lengths.min()} to {lengths.max()} tokens, median {int(np.median(lengths))}; data.max_prompt_length={limit}"
    )
    what, bars = "prompt lengths", _histogram(lengths, limit)
    over = [row_id for row_id, length in look.lengths.items() if length > limit]
    if not over:
        return Finding(what, value, details=bars)
    names = ", ".join(over[:_NAMED]) + (", ..." if len(over) > _NAMED else "")
    value = f"{len(over):,} of {counted} are longer ({names}): {value}"
    if config.filter_overlong_prompts and len(over) < len(lengths):
        return Finding(what, f"{value}; they are left out", "note", details=bars)
    fix = f"set data.max_prompt_length={lengths.max()}, or data.filter_overlong_prompts=true to leave such rows out"
    return Finding(what, value, "problem", fix, bars)


def _histogram(lengths: np.ndarray, limit: int) -> tuple[str, ...]:
    first, last = int(lengths.min()), int(lengths.max())
    width = max(1, -(-(last - first + 1) // _BARS))
    lines = []
    for start in range(first, last + 1, width):
        end = start + width - 1
        tokens = f"{start} to {end}" if width > 1 else f"{start}"
        count = int(((lengths >= start) & (lengths <= end)).sum())
        bar = "#" * max(count > 0, round(_BAR_WIDTH * count / len(lengths)))
        over = "  over data.max_prompt_length" if start > limit else ""
        lines.append(f"{tokens:<14}{count:>8,}  {bar}{over}")
    return tuple(lines)
