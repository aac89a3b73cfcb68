"""A look at the rows as the model will see them: a sample of them, and the first prompt in full."""

from __future__ import annotations

from asyncrl.config.schema import RunConfig
from asyncrl.data.dataset import open_train, open_validation
from asyncrl.data.prompts import PromptRenderer
from asyncrl.errors import UserError
from asyncrl.models.bridge import TurnBridge
from asyncrl.models.loading import stop_token_ids
from asyncrl.models.prompt_processor import prompt_processor
from asyncrl.models.row_survey import RowSurvey, measure_row, survey_rows

SAMPLE = 64
"""Rows of each source that are looked at where no survey of all of them is remembered."""


def preview_rows(config: RunConfig) -> tuple[str, int]:
    """Describe the rows and the first usable one: text, answer, tokens, and the grid of each image and video.

    Returns the number of training rows, too: the usable ones where all have been looked at, else all. Raises UserError
    if no row is usable, or one is bad under `data.on_bad_row: stop`, and for a chat template that cannot take the turns
    of the run's environment.
    """
    processor, renderer = prompt_processor(config), PromptRenderer(config.data)
    if config.environment.is_used:
        TurnBridge(processor, stop_token_ids(config.model, processor.tokenizer))
    train, limit = open_train(config.data), config.data.max_prompt_length
    surveys = [
        survey_rows(rows, renderer, processor, config, source, sample=SAMPLE)
        for rows, source in ((train, "training"), (open_validation(config.data), "held-out"))
        if rows is not None
    ]
    found = [_describe(survey, config) for survey in surveys]
    usable = surveys[0].usable
    if config.algorithm.demonstrations.are_used and (without := surveys[0].num_without_target):
        found.append(f"of {len(usable):,} usable training rows {without:,} have no demonstration (data.target_key)")
    rendered, encoded = measure_row(train, usable[0], renderer, processor, config)
    seen = "images and videos" if encoded.video_hashes else "images"
    lines = [
        *(f"| {line}" for line in processor.render(rendered.prompt).splitlines()),
        f"answer: {rendered.prompt.answer!r}",
        f"tokens: {len(encoded.token_ids)} of at most {limit}, {encoded.media_tokens} for {seen}",
        f"images: {len(encoded.image_hashes)}",
    ]
    for grid, digest in zip(encoded.image_grids.tolist(), encoded.image_hashes, strict=True):
        lines.append(f"  {digest[:12]}: {processor.describe_grid(grid)}")
    if encoded.video_hashes:
        lines.append(f"videos: {len(encoded.video_hashes)}")
    for (t, h, w), video in zip(encoded.video_grids.tolist(), rendered.prompt.videos, strict=True):
        lines.append(f"  {len(video.frame_hashes)} frames at {video.fps:g} per second: {t} x {h} x {w} patches")
    prompt = "\n".join([f"first prompt ({rendered.prompt.row_id}):", *(f"  {line}" for line in lines)])
    complete = surveys[0].num_looked_at == len(train)
    return "\n".join([*found, prompt]), len(usable) if complete else len(train)


def _describe(survey: RowSurvey, config: RunConfig) -> str:
    problem = survey.describe_bad()
    if problem and not survey.leaves_out(config.data):
        raise UserError(problem)
    looked_at = f"{survey.source} rows: {survey.num_looked_at:,} of {len(survey.facts):,} were looked at"
    return (
        f"{looked_at}\n{problem}\nThey are left out (data.on_bad_row=skip)" if problem else f"{looked_at}, all usable"
    )
