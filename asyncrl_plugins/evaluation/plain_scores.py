"""Scores of a model folder on held-out rows of one turn, without an engine.

Independent of the services on purpose: transformers' own `generate`, the configured rewards.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from asyncrl.checks.inputs import check_lengths
from asyncrl.config.schema import RunConfig
from asyncrl.config.sections import RewardConfig
from asyncrl.data.prompts import RenderedPrompt
from asyncrl.data.survey.held_out import held_out_prompts
from asyncrl.devices.device import compute_in_full_float32, resolve_device, resolve_dtype
from asyncrl.errors import BadStateError, UserError
from asyncrl.model_files.folder import describe_folder, describe_model, model_folder
from asyncrl.models.loading import has_vision, model_of_export
from asyncrl.models.lora import is_adapter_folder, load_policy
from asyncrl.processing.encoded_prompt import media_arguments
from asyncrl.processing.processor import PLACEHOLDER_ID_NAMES, PromptProcessor, special_token_ids
from asyncrl.rewards.sample import RewardSample, sample_of
from asyncrl.rewards.score import EvaluationScores, Score, accuracy_and_reward, evaluation_scores
from asyncrl.rewards.scorer import RewardScorer
from asyncrl.rewards.spec import check_rewarded
from protocol.messages import TrajectoryRecord

BATCH_COMPLETIONS = 64
PROGRESS_S = 10.0
"""Seconds between two lines that say how far it is."""


class EvaluatedRow(NamedTuple):
    sample: RewardSample
    """Sample of a completion; of a conversation the row, without its images, and the last turn's text."""
    score: Score
    record: TrajectoryRecord | None = None
    """Record of a conversation that has begun."""
    turns: Sequence[dict[str, Any]] = ()
    """Turns of a conversation, as JSON (`described_turns`)."""


class EvaluationProgress:
    """Says every PROGRESS_S seconds on stderr how many completions there are, and how long the others may take."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._began = self._told = time.monotonic()

    def reached(self, done: int) -> None:
        now = time.monotonic()
        if now - self._told <= PROGRESS_S or not 0 < done < self._total:
            return
        self._told, left = now, (now - self._began) / done * (self._total - done)
        print(f"{done} of {self._total} completions, about {left:.0f} s are left", file=sys.stderr, flush=True)


def evaluate(config: RunConfig, folder: Path, *, prefix: str = "") -> EvaluationScores:
    """Score every held-out row with the model in `folder`, or with its adapter on `model.path`.

    `evaluation.group_size` completions a row at `evaluation.temperature`, 0 being greedy, from the whole distribution.
    `prefix`: text that every completion is made to begin with, as part of it.
    """
    return summarise(
        score_held_out(config, folder, prefix=prefix), config.evaluation.group_size, config.reward.accuracy_component
    )


def score_held_out(config: RunConfig, folder: Path, *, prefix: str = "") -> list[EvaluatedRow]:
    """Every completion that `evaluate` looks at with its score, those of a row one after the other."""
    samples = complete_held_out(config, folder, prefix)
    return [
        EvaluatedRow(*pair)
        for pair in zip(samples, asyncio.run(_score(config.reward, config.evaluation.group_size, samples)), strict=True)
    ]


def summarise(scored: Sequence[EvaluatedRow], size: int, name: str) -> EvaluationScores:
    """Scores of rows with `size` completions each; `name` is the component that is the accuracy.

    Raises UserError where no completion could be scored, BadStateError where the environment lost most of them."""
    scores = [item.score for item in scored]
    if lost := [score for score in scores if score.error_kind.startswith("environment_")]:
        kinds = ", ".join(f"{number} {kind}" for kind, number in Counter(s.error_kind for s in lost).most_common())
        if len(lost) > len(scores) / 2:
            raise BadStateError(
                f"the environment failed in {len(lost)} of {len(scores)} trajectories ({kinds}): means over the others "
                f"would say little. The last one says: {lost[-1].error_message}. Bring back what the environment needs "
                "(a service, a file, memory) or repair it (asyncrl env try), then evaluate again"
            )
    if all(score.reward is None for score in scores):
        raise UserError(f"none of {len(scores)} completions could be scored: {scores[0].error_message}")
    return evaluation_scores(known_scores(scores, size, name))


def known_scores(scores: Sequence[Score], size: int, name: str) -> list[list[tuple[float, float] | None]]:
    """Accuracy (component `name`) and reward of each completion of each row, of `size` completions; None without a
    score."""
    known = [accuracy_and_reward(score.components, score.reward, name) for score in scores]
    return [known[start : start + size] for start in range(0, len(known), size)]


def scores_line(scores: EvaluationScores, size: int, name: str) -> str:
    """Scores of rows with `size` completions each. A share of right completions (pass@1, pass@k) is said of the
    component `name` where it is 0 or 1 for each; of one that is graded, its mean."""
    first, best = (f"mean {name or 'reward'}", f"best of {size}") if scores.is_graded else ("pass@1", f"pass@{size}")
    found = [f"{first} {scores.accuracy:.4f} ± {scores.accuracy_error:.4f} (standard error)"]
    found += [f"{best} {scores.best:.4f}"] if size > 1 else []
    return "   ".join([*found, f"reward {scores.reward:.4f}", f"rows {scores.rows}", f"errors {scores.errors}"])


def complete_held_out(config: RunConfig, folder: Path, prefix: str = "") -> list[RewardSample]:
    """Completions of every held-out row, those of a row one after the other, as `evaluate` scores them."""
    config = resolve_dtype(config)
    if config.environment.is_used:
        raise UserError(
            "the configuration has an environment that answers, and this samples one turn: the scores would not be the "
            "run's. `asyncrl eval` plays the turns"
        )
    check_rewarded(config.reward, config.environment)
    base = config.model
    if not is_adapter_folder(folder):
        base = model_of_export(base, folder).model_copy(update={"path": str(folder), "quantization": ""})
    check_lengths(config.model_copy(update={"model": base}), describe_folder(base))
    processor = PromptProcessor(base, config.data.chat_template_kwargs)
    rows = list(held_out_prompts(config.data, processor, config.network.max_message_mib)[1])
    hf_config = describe_model(model_folder(base), trust_remote_code=base.trust_remote_code)
    device = resolve_device(config.rollout.device, "rollout.device")
    compute_in_full_float32()
    model = load_policy(base, folder, base.quantization).to(device).eval()
    banned = sorted(special_token_ids(hf_config, PLACEHOLDER_ID_NAMES))
    size, temperature = config.evaluation.group_size, config.evaluation.temperature
    sampling = {
        "max_new_tokens": config.data.max_response_length,
        "suppress_tokens": banned or None,
        "eos_token_id": list(processor.ends.stop_token_ids),
        # The folder's generation_config.json may cut the distribution: a top_k of 50 is transformers' own default.
        **({"temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}),
        "do_sample": temperature > 0,
    }
    torch.manual_seed(config.trainer.seed)
    samples: list[RewardSample] = []
    per_batch = max(1, BATCH_COMPLETIONS // size)
    progress = EvaluationProgress(len(rows) * size)
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
        progress.reached(len(samples))
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
    if processor.tokenizer.pad_token is None:  # any token: attention leaves padding out
        processor.tokenizer.pad_token = processor.tokenizer.convert_ids_to_tokens(sampling["eos_token_id"][0])
    inputs = processor.processor(
        text=texts, padding=True, return_tensors="pt", add_special_tokens=False, **arguments
    ).to(model.device)
    output = model.generate(**inputs, **sampling, pad_token_id=processor.tokenizer.pad_token_id)
    tokenizer, completions = processor.tokenizer, output[:, inputs["input_ids"].shape[1] :]
    stops = torch.isin(completions, torch.tensor(sampling["eos_token_id"], device=completions.device))
    ended, before = stops.any(dim=1).tolist(), (stops.cumsum(dim=1) == 0).sum(dim=1).tolist()
    decoded = tokenizer.batch_decode(completions, skip_special_tokens=True)
    return [(prefix + text, stop, n + stop) for text, stop, n in zip(decoded, ended, before, strict=True)]


async def _score(reward: RewardConfig, size: int, samples: Sequence[RewardSample]) -> list[Score]:
    """`samples`: those of a row one after the other."""
    scorer = RewardScorer(reward)
    await scorer.start()
    try:
        groups = [scorer.group(size) for _ in range(len(samples) // size)]
        return await asyncio.gather(
            *(groups[number // size].score(number % size, sample) for number, sample in enumerate(samples))
        )
    finally:
        await scorer.close()
