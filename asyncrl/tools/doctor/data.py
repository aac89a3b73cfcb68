"""Checks of rows (length, refusals, train/held-out overlap) and rewards."""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from asyncrl.config.schema import RunConfig
from asyncrl.config.sections import DataConfig
from asyncrl.data.dataset import RowSource
from asyncrl.data.prompts import PromptRenderer, RenderedPrompt
from asyncrl.errors import UserError
from asyncrl.models.processing import PromptProcessor
from asyncrl.rewards.pool import RewardPool, Score
from asyncrl.rewards.presentation import sample_of
from asyncrl.tools.doctor.findings import Finding, Findings, split_fix

LOOK_S = 10.0
"""Spent on each data source; small ones are looked at whole."""
_ROW = re.compile(r"^row \S+?(?=[,:] | has )(, (?:image|video) \d+)?:? ?")


@dataclass
class Look:
    """Statistics of the examined rows of one source."""

    lengths: dict[str, int] = field(default_factory=dict)
    """Number of tokens of each row."""
    refused: dict[str, list[tuple[str, str]]] = field(default_factory=lambda: defaultdict(list))
    """Rows and messages by what they have in common."""
    texts: set[str] = field(default_factory=set)
    """Rendered prompts."""
    questions: set[str] = field(default_factory=set)
    """Questions of the rows, before any template."""
    keys: dict[str, str] = field(default_factory=dict)
    """Rows by hash of what the model sees of them."""


def find_prompts(config: RunConfig, rows: RowSource, purpose: str, renderer: PromptRenderer) -> Findings[Look]:
    """Report rows, refusals and lengths; `purpose` is training or held-out."""
    processor, data = PromptProcessor(config.model), config.data
    look = _look_at(data, rows, renderer, processor)
    seen = len(look.lengths) + sum(map(len, look.refused.values()))
    counted = f"{seen:,} of {len(rows):,} {purpose} rows"
    yield Finding(f"{purpose} rows", f"{len(rows):,} with columns {', '.join(rows.columns)}; {counted} looked at")
    for refused in look.refused.values():
        reason, fix = split_fix(refused[0][1])
        value = f"{len(refused):,} of {counted} would be refused (such as {refused[0][0]}): {reason}"
        yield Finding("refused rows", value, "problem", fix or "mend these rows or leave them out")
    if look.lengths:
        yield _judge_lengths(look, data, counted)
    if len(look.texts) == 1 and len(look.questions) > 1:
        value = f"all of {counted} become one and the same prompt, though they ask different things"
        fix = "the template (data.format_prompt, or the model's chat template) has to print `content`"
        yield Finding("template", value, "problem", fix)
    return look


def find_twins(train: Look, held_out: Look) -> Findings[None]:
    """Report held-out prompts that are also in the training data."""
    twins = [(row, train.keys[key]) for key, row in held_out.keys.items() if key in train.keys]
    value = f"{len(twins):,} of {len(held_out.keys):,} held-out prompts are trained on, too"
    if twins:
        fix = "take them out of one of data.train_files and data.val_files"
        yield Finding("held-out is apart", f"{value}: {twins[0][0]} is {twins[0][1]}", "warning", fix)
    else:
        yield Finding("held-out is apart", value)


def _look_at(config: DataConfig, rows: RowSource, renderer: PromptRenderer, processor: PromptProcessor) -> Look:
    """Render the first row, then random rows until LOOK_S is over."""
    look = Look()
    until = time.monotonic() + LOOK_S
    others = np.random.default_rng(0).permutation(len(rows)).tolist()
    for index in dict.fromkeys((0, *others)):
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
        seen = "\n".join((text, *encoded.image_hashes, *encoded.video_hashes))
        look.keys[hashlib.sha256(seen.encode()).hexdigest()] = row_id
    return look


def _judge_lengths(look: Look, config: DataConfig, counted: str) -> Finding:
    """Report min, median and max length; a problem if rows over the limit are not filtered out."""
    lengths, limit = np.array(list(look.lengths.values())), config.max_prompt_length
    value = (
        f"{lengths.min()} to {lengths.max()} tokens, median {int(np.median(lengths))}; data.max_prompt_length={limit}"
    )
    over = [row_id for row_id, length in look.lengths.items() if length > limit]
    if not over:
        return Finding("prompt lengths", value)
    value = f"{len(over):,} of {counted} are longer (such as {over[0]}): {value}"
    if config.filter_overlong_prompts and len(over) < len(lengths):
        return Finding("prompt lengths", f"{value}; they are left out", "note")
    fix = f"set data.max_prompt_length={lengths.max()}, or data.filter_overlong_prompts=true to leave such rows out"
    return Finding("prompt lengths", value, "problem", fix)


# --- rewards ---------------------------------------------------------------------------------------

ROWS = 3
"""Rows that are scored."""
ROWS_TRIED = 100
"""Rows looked at for that: those that cannot be rendered do not count."""
NOTHING = "nothing"


def find_rewards(config: RunConfig, rows: RowSource, renderer: PromptRenderer) -> Findings[None]:
    scored = asyncio.run(_score(config, list(islice(_rendered_rows(rows, renderer), ROWS))))
    failed = ((name, score) for name, scores in scored.items() for score in scores if score.status != "ok")
    for name, score in failed:
        value = f"{score.error_kind} on {name}: {score.error_message}"
        fix = "mend the function: a trajectory that it fails on is left out of training, never scored 0"
        yield Finding("reward", value, "problem", fix)
        return  # the others are of the same function
    if not scored:
        yield Finding("reward", "was loaded, but there is no row to score", "note")
        return
    for name in config.reward.component_names:
        parts = [
            f"{', '.join(f'{score.components[name]:g}' for score in scores)} for {completion}"
            for completion, scores in scored.items()
        ]
        yield Finding("reward", f"{name}: {'; '.join(parts)}")
    weighted = {completion: [score.reward for score in scores] for completion, scores in scored.items()}
    worthless = weighted.pop(NOTHING)
    if all(values == worthless for values in weighted.values()):
        value = f"the weighted sum does not tell {' or '.join(weighted)} from {NOTHING}"
        fix = "look whether the reward wants a form that data.format_prompt or the warm start teaches; if not, mend it"
        yield Finding("reward", value, "warning", fix)


def _rendered_rows(rows: RowSource, renderer: PromptRenderer) -> Iterator[tuple[RenderedPrompt, dict[str, object]]]:
    for index in range(min(len(rows), ROWS_TRIED)):
        row = dict(rows[index])
        try:
            yield renderer.render(row, rows.row_id(index)), row
        except UserError:  # find_prompts reports it
            continue


async def _score(config: RunConfig, rows: Sequence[tuple[RenderedPrompt, dict[str, object]]]) -> dict[str, list[Score]]:
    """Score up to three completions per row: the answer, an empty text, the demonstration if it has one."""
    pool, key = RewardPool(config.reward.model_copy(update={"workers": 1})), config.data.target_key
    await pool.start()
    try:
        scored: dict[str, list[Score]] = defaultdict(list)
        for rendered, row in rows:
            completions = {"the answer": str(rendered.prompt.answer), NOTHING: ""}
            if row.get(key):
                completions[key] = str(row[key])
            for name, text in completions.items():
                scored[name].append(await pool.score(sample_of(rendered.prompt, text, rendered.blobs, "stop")))
        return scored
    finally:
        await pool.close()
