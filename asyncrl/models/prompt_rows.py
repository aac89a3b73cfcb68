"""Rows of the data as the model will see them: which are short enough, and a preview of one."""

from __future__ import annotations

import logging

from asyncrl.config.schema import RunConfig
from asyncrl.config.sections import DataConfig
from asyncrl.data.dataset import RowSource, open_train
from asyncrl.data.prompts import PromptRenderer
from asyncrl.errors import UserError
from asyncrl.models.processing import PromptProcessor, check_prompt_length

logger = logging.getLogger(__name__)


def usable_rows(rows: RowSource, renderer: PromptRenderer, processor: PromptProcessor, config: DataConfig) -> list[int]:
    """Indices of the rows within data.max_prompt_length, with data.filter_overlong_prompts; else of all rows.

    Rows that are left out are named and counted in the log. Without the filter an overlong one stops the run later.
    """
    everything = list(range(len(rows)))
    if not config.filter_overlong_prompts:
        return everything
    limit = config.max_prompt_length
    usable: list[int] = []
    for index in everything:
        rendered = renderer.render(rows[index], rows.row_id(index))
        length = len(processor.encode(rendered.prompt, rendered.blobs).token_ids)
        if length <= limit:
            usable.append(index)
        else:
            logger.warning(
                "row %s has %d tokens, over data.max_prompt_length: left out", rendered.prompt.row_id, length
            )
    logger.info("%d of %d rows are within data.max_prompt_length = %d", len(usable), len(everything), limit)
    if not usable:
        raise _all_overlong(rows, limit)
    return usable


def _all_overlong(rows: RowSource, limit: int) -> UserError:
    return UserError(
        f"all {len(rows)} prompts ({rows.row_id(0)}, ...) are over data.max_prompt_length = {limit}: raise it"
    )


def preview_prompt(config: RunConfig) -> str:
    """The first row to be trained as the model sees it: text, answer, tokens, and the grid of each image and video."""
    rows, limit = open_train(config.data), config.data.max_prompt_length
    processor, renderer = PromptProcessor(config.model), PromptRenderer(config.data)
    for index in range(len(rows)):
        rendered = renderer.render(rows[index], rows.row_id(index))
        encoded = processor.encode(rendered.prompt, rendered.blobs)
        if len(encoded.token_ids) <= limit or not config.data.filter_overlong_prompts:
            break
    else:
        raise _all_overlong(rows, limit)
    check_prompt_length(encoded, limit)
    seen = "images and videos" if encoded.video_hashes else "images"
    lines = [
        *(f"| {line}" for line in processor.render(rendered.prompt).splitlines()),
        f"answer: {rendered.prompt.answer!r}",
        f"tokens: {len(encoded.token_ids)} of at most {limit}, {encoded.media_tokens} for {seen}",
        f"images: {len(encoded.image_hashes)}",
    ]
    for (t, h, w), digest in zip(encoded.image_grids.tolist(), encoded.image_hashes, strict=True):
        lines.append(f"  {digest[:12]}: {t} x {h} x {w} patches")
    if encoded.video_hashes:
        lines.append(f"videos: {len(encoded.video_hashes)}")
    for (t, h, w), video in zip(encoded.video_grids.tolist(), rendered.prompt.videos, strict=True):
        lines.append(f"  {len(video.frame_hashes)} frames at {video.fps:g} per second: {t} x {h} x {w} patches")
    return "\n".join([f"first prompt ({rendered.prompt.row_id}):", *(f"  {line}" for line in lines)])
