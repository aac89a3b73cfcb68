"""Score a model folder on the held-out rows with nothing but transformers: `asyncrl eval CONFIG --model FOLDER`.

Independent of the services on purpose: plain `from_pretrained`, plain `generate`, the configured rewards.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from asyncrl.config.schema import RunConfig
from asyncrl.data.dataset import open_validation
from asyncrl.data.prompts import PromptRenderer, RenderedPrompt
from asyncrl.errors import UserError
from asyncrl.models.devices import compute_in_full_float32, resolve_device, resolve_dtype
from asyncrl.models.folder import describe_model, model_folder
from asyncrl.models.loading import has_vision, model_class, torch_dtype
from asyncrl.models.lora import is_adapter_folder, load_merged
from asyncrl.models.model_inputs import place_text_after_videos
from asyncrl.models.processing import PLACEHOLDER_ID_NAMES, PromptProcessor, media_arguments, special_token_ids
from asyncrl.models.row_survey import usable_rows
from asyncrl.rewards.evaluation_scores import EvaluationScores, evaluation_scores
from asyncrl.rewards.pool import RewardPool
from asyncrl.rewards.presentation import sample_of
from asyncrl.rewards.sample import RewardSample
from asyncrl.rewards.score import Score
from asyncrl.rewards.spec import check_rewarded
from asyncrl.telemetry.jsonl import write_atomically

BATCH_COMPLETIONS = 64
PROGRESS_S = 10.0
"""Seconds between two lines that say how far it is."""


class Scored(NamedTuple):
    sample: RewardSample
    score: Score


def evaluate(config: RunConfig, folder: Path, *, prefix: str = "") -> EvaluationScores:
    """Score every held-out row with the model in `folder`, or with its adapter on `model.path`.

    `evaluation.group_size` completions a row at `evaluation.temperature`, 0 being greedy, from the whole distribution.
    `prefix`: text that every completion is made to begin with, as part of it.
    """
    return summarise(config, score_held_out(config, folder, prefix=prefix))


def score_held_out(config: RunConfig, folder: Path, *, prefix: str = "") -> list[Scored]:
    """Every completion that `evaluate` looks at with its score, those of a row one after the other."""
    samples = complete_held_out(config, folder, prefix)
    return [Scored(*pair) for pair in zip(samples, asyncio.run(_score(config, samples)), strict=True)]


def summarise(config: RunConfig, scored: Sequence[Scored]) -> EvaluationScores:
    """Raises UserError where no completion could be scored."""
    size, name = config.evaluation.group_size, config.reward.accuracy_component
    if all(score.reward is None for _, score in scored):
        raise UserError(f"none of {len(scored)} completions could be scored: {scored[0].score.error_message}")
    known = [None if score.reward is None else (score.components[name], score.reward) for _, score in scored]
    return evaluation_scores([known[start : start + size] for start in range(0, len(known), size)])


def component_means(scored: Sequence[Scored]) -> dict[str, float]:
    """Mean of each component over the completions that have a score."""
    known = [score.components for _, score in scored if score.reward is not None]
    return {name: sum(components[name] for components in known) / len(known) for name in (known[0] if known else ())}


def write_scored(scored: Sequence[Scored], file: Path) -> None:
    """A line of JSON for each completion: its row with answer and columns, its text, and its components (or null)."""
    lines = (
        {
            "row_id": sample.row_id,
            "answer": sample.answer,
            "columns": sample.columns,
            "completion": sample.completion,
            "components": None if score.reward is None else score.components,
            "reward": score.reward,
            "error": score.error_message,
        }
        for sample, score in scored
    )
    text = "".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines)
    write_atomically(file, text.encode("utf-8", "surrogatepass"))


def complete_held_out(config: RunConfig, folder: Path, prefix: str = "") -> list[RewardSample]:
    """Completions of every held-out row, those of a row one after the other, as `evaluate` scores them."""
    config = resolve_dtype(config)
    if config.environment.is_used:
        raise UserError(
            "this command samples one turn, and the configuration has an environment that answers: the scores would "
            "not be the run's. Set evaluation.every_steps, or leave environment out"
        )
    check_rewarded(config)
    held_out = open_validation(config.data)
    if held_out is None:
        raise UserError("data.val_files is empty: there is nothing to evaluate on")
    is_adapter = is_adapter_folder(folder)
    whole = model_folder(config.model) if is_adapter else folder
    processor = PromptProcessor(config.model.model_copy(update={"path": str(whole)}))
    hf_config = describe_model(whole)
    device = resolve_device(config.rollout.device, "rollout.device")
    compute_in_full_float32()
    if is_adapter:
        model = load_merged(config.model, folder)
    else:
        model = model_class(hf_config).from_pretrained(folder, dtype=torch_dtype(config.model))
        place_text_after_videos(model)
    model = model.to(device).eval()
    banned = sorted(special_token_ids(hf_config, PLACEHOLDER_ID_NAMES))
    renderer = PromptRenderer(config.data)
    usable = usable_rows(held_out, renderer, processor, config, "held-out").usable
    rows = [renderer.render(held_out[i], held_out.row_id(i)) for i in usable]
    size, temperature = config.evaluation.group_size, config.evaluation.temperature
    sampling = {
        "max_new_tokens": config.data.max_response_length,
        "suppress_tokens": banned or None,
        # The folder's generation_config.json may cut the distribution: a top_k of 50 is transformers' own default.
        **({"temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}),
        "do_sample": temperature > 0,
    }
    torch.manual_seed(config.trainer.seed)
    samples: list[RewardSample] = []
    per_batch = max(1, BATCH_COMPLETIONS // size)
    began = reported = time.monotonic()
    for start in range(0, len(rows), per_batch):
        chunk = [rendered for rendered in rows[start : start + per_batch] for _ in range(size)]
        texts = _generate(model, processor, chunk, prefix, sampling, has_vision(hf_config))
        samples += [
            sample_of(
                rendered.prompt,
                text,
                rendered.blobs,
                "stop" if ended else "length",
                num_tokens=num_tokens,
                max_tokens=config.data.max_response_length,
            )
            for rendered, (text, ended, num_tokens) in zip(chunk, texts, strict=True)
        ]
        now, total = time.monotonic(), len(rows) * size
        if now - reported > PROGRESS_S and len(samples) < total:
            reported, left = now, (now - began) / len(samples) * (total - len(samples))
            print(f"{len(samples)} of {total} completions, about {left:.0f} s are left", file=sys.stderr, flush=True)
    return samples


@torch.inference_mode()
def _generate(
    model: Any,
    processor: PromptProcessor,
    rows: Sequence[RenderedPrompt],
    prefix: str,
    sampling: dict[str, Any],
    vision: bool,
) -> list[tuple[str, bool, int]]:
    """Text of each completion, whether it ended by itself, and its number of tokens."""
    texts = [processor.render(rendered.prompt) + prefix for rendered in rows]
    blobs = {digest: data for rendered in rows for digest, data in rendered.blobs.items()}
    arguments = media_arguments([rendered.prompt for rendered in rows], blobs) if vision else {}
    processor.tokenizer.padding_side = "left"
    inputs = processor.processor(
        text=texts, padding=True, return_tensors="pt", add_special_tokens=False, **arguments
    ).to(model.device)
    output = model.generate(**inputs, **sampling)
    tokenizer, completions = processor.tokenizer, output[:, inputs["input_ids"].shape[1] :]
    stops = completions == tokenizer.eos_token_id
    ended, before = stops.any(dim=1).tolist(), (stops.cumsum(dim=1) == 0).sum(dim=1).tolist()
    decoded = tokenizer.batch_decode(completions, skip_special_tokens=True)
    return [(prefix + text, stop, n + stop) for text, stop, n in zip(decoded, ended, before, strict=True)]


async def _score(config: RunConfig, samples: Sequence[RewardSample]) -> list[Score]:
    """`samples`: those of a row one after the other."""
    pool, size = RewardPool(config.reward, config.network), config.evaluation.group_size
    await pool.start()
    try:
        groups = [pool.group(size) for _ in range(len(samples) // size)]
        return await asyncio.gather(
            *(groups[number // size].score(number % size, sample) for number, sample in enumerate(samples))
        )
    finally:
        await pool.close()
