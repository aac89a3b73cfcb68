"""Held-out accuracy of a model folder by transformers alone: an oracle of tests, without engine and evaluator."""

from __future__ import annotations

import asyncio
from pathlib import Path
from statistics import fmean

import torch

from asyncrl.config.schema import RunConfig, changed
from asyncrl.data.prompts import RenderedPrompt
from asyncrl.data.survey.held_out import held_out_prompts
from asyncrl.models.lora import is_adapter_folder, load_policy
from asyncrl.processing.encoded_prompt import media_arguments
from asyncrl.processing.processor import PromptProcessor
from asyncrl.rewards.sample import RewardSample, sample_of
from asyncrl.rewards.scorer import RewardScorer


@torch.inference_mode()
def plain_accuracy(config: RunConfig, folder: Path) -> float:
    """Mean accuracy of a greedy completion of each held-out row, made one by one and so without padding."""
    model = config.model if is_adapter_folder(folder) else changed(config, {"model.path": str(folder)}).model
    processor, policy = PromptProcessor(model), load_policy(model, folder).eval()
    limit, stops = config.data.max_response_length, processor.ends.stop_token_ids

    def completed(rendered: RenderedPrompt) -> RewardSample:
        media = media_arguments([rendered.prompt], rendered.blobs)
        text = [processor.render(rendered.prompt)]
        inputs = processor.processor(text=text, return_tensors="pt", add_special_tokens=False, **media)
        whole = policy.generate(
            **inputs,
            do_sample=False,
            max_new_tokens=limit,
            suppress_tokens=list(processor.placeholder_ids) or None,
            eos_token_id=list(stops),
            pad_token_id=stops[0],
        )
        tokens = whole[0, inputs["input_ids"].shape[1] :].tolist()
        reason = "stop" if tokens[-1] in stops else "length"
        written = processor.tokenizer.decode(tokens, skip_special_tokens=True)
        return sample_of(rendered.prompt, written, rendered.blobs, reason, num_tokens=len(tokens), max_tokens=limit)

    rows = held_out_prompts(config.data, processor, config.network.max_message_mib)[1]
    return asyncio.run(_mean_accuracy(config, [completed(rendered) for rendered in rows]))


async def _mean_accuracy(config: RunConfig, samples: list[RewardSample]) -> float:
    name, scorer = config.reward.accuracy_component, RewardScorer(config.reward)
    await scorer.start()
    try:
        scores = [await scorer.group(1).score(0, sample) for sample in samples]
    finally:
        await scorer.close()
    return fmean(score.components[name] for score in scores)
