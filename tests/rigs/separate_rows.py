"""Packed groups against plain forward passes of each row by itself: log-probs and gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from asyncrl.config.schema import RunConfig
from asyncrl.models.loading import load_model
from asyncrl.models.sampling_distribution import gather_logprobs, sampling_logprobs
from asyncrl.processing.processor import PromptProcessor
from learner.training.batch import Batch
from learner.training.engine import TorchEngine
from learner.training.packing import PackedTrajectory, Segment, TrainGroup, build_micro_batch, plan_micro_batches


def check_packing(config: RunConfig, processor: PromptProcessor, batch: Batch, budget: int) -> int:
    """Compare the packed groups with their rows, vision tower included. Returns the number of micro-batches."""
    engine = TorchEngine(config.model_settings, config.learner.optim, 1)
    engine.prepare()
    plain: Any = load_model(config.model, device=torch.device("cpu")).train()
    banned = torch.tensor(sorted(processor.placeholder_ids))
    plan = plan_micro_batches(batch.train_groups, budget)
    packed = [engine.forward(build_micro_batch(engine.model, part, engine.device)).logprobs for part in plan]
    ours = torch.cat(packed)
    theirs = torch.cat([_separately(plain, config, banned, g, c) for part in plan for g in part for c in g.completions])
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    direction = torch.randn(len(ours), generator=torch.Generator().manual_seed(0))
    for model, logprobs in ((engine.model, ours), (plain, theirs)):
        model.zero_grad()
        (logprobs * direction).sum().backward()
    wanted = dict(plain.named_parameters())
    for name, parameter in engine.model.named_parameters():
        if parameter.grad is not None:
            scale = wanted[name].grad.norm().clamp_min(1e-6)
            assert (parameter.grad - wanted[name].grad).norm() / scale < 1e-4, name
    return len(plan)


def _separately(
    model: Any, config: RunConfig, banned: torch.Tensor, group: TrainGroup, c: PackedTrajectory
) -> torch.Tensor:
    """Log-probs of a completion's counted tokens from a plain forward pass of each segment's whole row; the model makes
    the positions itself."""
    ends = [*(segment.start for segment in c.segments[1:]), len(c.token_ids)]
    parts = [_row_separately(model, config, banned, group, c, s, end) for s, end in zip(c.segments, ends, strict=True)]
    return torch.cat(parts)


def _row_separately(
    model: Any,
    config: RunConfig,
    banned: torch.Tensor,
    group: TrainGroup,
    c: PackedTrajectory,
    segment: Segment,
    end: int,
) -> torch.Tensor:
    token_ids, mask = c.token_ids[segment.start : end], c.is_trained[segment.start : end]
    text = replace(group.prompt, token_ids=token_ids, token_types=np.zeros_like(token_ids), pixel_values=None)
    nothing = replace(text, image_grids=group.prompt.image_grids[:0], image_hashes=())
    row = group.prompt.followed_by([segment.observed or nothing])
    assert row.token_ids.tolist() == [*group.prompt.token_ids, *token_ids]
    inputs: dict[str, Any] = {
        "input_ids": torch.from_numpy(row.token_ids).long()[None],
        "mm_token_type_ids": torch.from_numpy(row.token_types).long()[None],
        "pixel_values": row.pixel_values,
        "image_grid_thw": torch.from_numpy(row.image_grids).long(),
    }
    logits = model(**inputs, use_cache=False).logits[0]
    kept = torch.from_numpy(np.flatnonzero(mask))
    at = len(group.prompt.token_ids) - 1 + kept
    logprobs = sampling_logprobs(logits[at], temperature=config.rollout.temperature, banned=banned)
    return gather_logprobs(logprobs, torch.from_numpy(token_ids).long()[kept])
