"""`data.filter_overlong_prompts`: which rows are short enough, known before anything is generated."""

from __future__ import annotations

import logging

from asyncrl.config.data import DataConfig
from asyncrl.data.dataset import RowSource
from asyncrl.data.prompts import PromptRenderer
from asyncrl.errors import UserError
from asyncrl.models.processing import PromptProcessor

logger = logging.getLogger(__name__)


def usable_rows(rows: RowSource, renderer: PromptRenderer, processor: PromptProcessor, config: DataConfig) -> list[int]:
    """With the filter, indices of the rows within data.max_prompt_length; else of all, and an overlong one stops the
    run when it is its turn. Rows that are left out are named and counted in the log.
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
        raise UserError(
            f"all {len(everything)} prompts ({rows.row_id(0)}, ...) are over data.max_prompt_length = {limit}: raise it"
        )
    return usable
