"""A look at the rows as the model will see them: a sample of them, and the first prompt in full."""

from __future__ import annotations

import asyncio

from asyncrl.config.environment import EnvironmentConfig
from asyncrl.config.schema import RunConfig
from asyncrl.config.sections import DataConfig
from asyncrl.data.dataset import open_train, open_validation
from asyncrl.data.images import content_hash
from asyncrl.data.prompts import RenderedPrompt
from asyncrl.data.survey.held_out import ticket_seed
from asyncrl.data.survey.row_survey import PromptRows, RowSurvey, overlong_opening
from asyncrl.environments.episodes import EnvironmentFailed, EnvironmentWorkers
from asyncrl.environments.observation import Observation
from asyncrl.errors import UserError
from asyncrl.models.generation_settings import generation_config
from asyncrl.processing.bridge import TurnBridge, start_of
from asyncrl.processing.encoded_prompt import EncodedPrompt
from asyncrl.processing.processor import PromptProcessor, image_rule, prompt_processor
from protocol.messages import Prompt

SAMPLE = 64
"""Rows of each source that are looked at where no survey of all of them is remembered."""


def preview_rows(config: RunConfig) -> tuple[str, int]:
    """Describe the rows and the first usable one: text, answer, tokens, and the grid of each image and video. With an
    environment its prompt ends with what an episode opens with, as the policy reads it in its first turn.

    Returns the number of training rows, too: the usable ones where all have been looked at, else all. Raises UserError
    if no row is usable, or one is bad under `data.on_bad_row: stop`, for a chat template that cannot take the turns of
    the run's environment, and for an environment that does not open.
    """
    generation_config(config.model)
    processor = prompt_processor(config.model, config.environment, config.data.chat_template_kwargs)
    bridge: TurnBridge | None = None
    if config.environment.is_used:
        bridge = TurnBridge(processor, processor.ends.stop_token_ids)
    limit = config.data.max_prompt_length
    sources = [
        PromptRows(rows, config.data, processor, config.network.max_message_mib, source)
        for rows, source in (
            (open_train(config.data, config.purpose), "training"),
            (open_validation(config.data, config.purpose), "held-out"),
        )
        if rows is not None
    ]
    surveys = [source.survey(SAMPLE) for source in sources]
    found = [*(_describe(survey, config.data) for survey in surveys), processor.ends.described]
    if len(surveys) == 2 and not config.environment.is_used and (shared := surveys[1].shared_with(surveys[0])):
        found.append(f"note: {len(shared):,} of the held-out prompts looked at are trained on, too")
    usable = surveys[0].usable
    if "target" in config.algorithm.needs and (without := surveys[0].num_without_target):
        found.append(f"of {len(usable):,} usable training rows {without:,} have no text in data.target_key")
    rendered, encoded = sources[0].measure(usable[0])
    prompt, told = rendered.prompt, ""
    if bridge:
        prompt, encoded, told = _with_opening(
            config.environment, rendered, encoded, bridge, seed=config.trainer.seed, limit=limit
        )
    seen = "images and videos" if encoded.video_hashes else "images"
    text = processor.render(prompt)
    if inserted := processor.template.described_system_prompt(text):
        found.append(f"note: {inserted}")
    lines = [
        *(f"| {line}" for line in text.splitlines()),
        *([told] if told else []),
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
    first = "\n".join([f"first prompt ({rendered.prompt.row_id}):", *(f"  {line}" for line in lines)])
    num_rows = len(sources[0].rows)
    return "\n".join([*found, first]), len(usable) if surveys[0].num_looked_at == num_rows else num_rows


def _with_opening(
    environment: EnvironmentConfig,
    rendered: RenderedPrompt,
    measured: EncodedPrompt,
    bridge: TurnBridge,
    *,
    seed: int,
    limit: int,
) -> tuple[Prompt, EncodedPrompt, str]:
    """The prompt as the policy reads it in its first turn, measured, and a line about what the environment adds to it.

    Raises UserError where no episode begins, or the prompt is too long then.
    """
    opening = asyncio.run(_opening(environment, rendered, bridge.processor, seed))
    if opening is None:
        return rendered.prompt, measured, "opening: none, reset() adds nothing"
    prompt = bridge.opened(rendered.prompt, opening)
    shown = {content_hash(image): image for image in opening.images}
    opened = bridge.processor.measure(prompt, {**shown, **rendered.blobs})
    if len(opened.token_ids) > limit:
        raise UserError(overlong_opening(opened, limit))
    added = len(opened.token_ids) - len(measured.token_ids)
    return prompt, opened, f"opening: {added} of the tokens and {len(opening.images)} of the images are reset()'s"


async def _opening(
    environment: EnvironmentConfig, rendered: RenderedPrompt, processor: PromptProcessor, seed: int
) -> Observation | None:
    """Opening of an episode of this row; the episode is closed then. Raises UserError."""
    one = environment.model_copy(update={"workers": 1, "instances_per_worker": 1, "retries": 0})
    images = [rendered.blobs[digest] for digest in rendered.prompt.image_hashes]
    workers = EnvironmentWorkers(one, image_rule(processor))
    try:
        await workers.start()
        episode = await workers.begin(start_of(rendered.prompt, images, ticket_seed(seed, 0)))
        await episode.close()
        return episode.opening
    except EnvironmentFailed as failed:
        raise UserError(
            f"row {rendered.prompt.row_id}: the environment opens no episode: {failed.kind}: {failed}. Give it what it "
            "needs (a service, a file, a column of the row), or fix its reset()"
        ) from failed
    finally:
        await workers.close()


def _describe(survey: RowSurvey, data: DataConfig) -> str:
    problem = survey.describe_bad()
    if problem and not survey.leaves_out(data):
        raise UserError(problem)
    looked_at = f"{survey.source} rows: {survey.num_looked_at:,} of {len(survey.facts):,} were looked at"
    return (
        f"{looked_at}\n{problem}\nThey are left out (data.on_bad_row=skip)" if problem else f"{looked_at}, all usable"
    )
