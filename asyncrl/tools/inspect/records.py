"""Samples as plain JSON values, for `--json` and for the page."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import numpy as np

from asyncrl.tools.inspect.pictures import image_facts
from asyncrl.tools.pages.token_levels import Colouring, token_levels
from asyncrl.tools.samples import SampleDetail, SampleRow, TrajectoryDetail


def row_record(row: SampleRow, beginning: str) -> dict[str, Any]:
    """`beginning`: of its completion."""
    return {name: _finite(value) for name, value in asdict(row).items()} | {"completion": beginning}


def detail_record(detail: SampleDetail) -> dict[str, Any]:
    """One group: its prompt, images (without bytes) and completions with a value of every column per token."""
    return {
        **{name: getattr(detail, name) for name in ("ticket_id", "step", "server_id", "row_id", "prompt", "messages")},
        "answer": detail.answer,
        "problem": detail.problem,
        "images": [asdict(image_facts(image)) for image in detail.images],
        "trajectories": [
            _trajectory(row, trajectory) for row, trajectory in zip(detail.rows, detail.trajectories, strict=True)
        ],
    }


def consumed_at(row: SampleRow, trajectory: TrajectoryDetail) -> int:
    """The policy version that trained on it, or would now."""
    sampled = trajectory.versions[trajectory.loss_mask == 1]
    return int(sampled.min()) + row.staleness if sampled.size else 0


def levels_of(row: SampleRow, trajectory: TrajectoryDetail) -> dict[Colouring, str]:
    learner = trajectory.learner_logprobs
    return token_levels(
        logprobs=trajectory.logprobs.tolist(),
        learner_logprobs=None if learner is None else learner.tolist(),
        versions=trajectory.versions.tolist(),
        consumed_at=consumed_at(row, trajectory),
        loss_mask=trajectory.loss_mask.tolist(),
        masked=trajectory.masked.tolist(),
    )


def _trajectory(row: SampleRow, trajectory: TrajectoryDetail) -> dict[str, Any]:
    learner = trajectory.learner_logprobs
    return {
        "trajectory": row.trajectory,
        "status": trajectory.status,
        "finish_reason": trajectory.finish_reason,
        "reward": _finite(trajectory.reward),
        "rewards": {name: _finite(value) for name, value in trajectory.rewards.items()},
        "advantage": _finite(trajectory.advantage),
        "error": trajectory.error,
        "length": row.length,
        "staleness": row.staleness,
        "logprob_diff_max": _finite(row.logprob_diff_max),
        "consumed_at": consumed_at(row, trajectory),
        "tokens": trajectory.tokens,
        "token_ids": trajectory.token_ids.tolist(),
        "logprobs": _rounded(trajectory.logprobs),
        "learner_logprobs": None if learner is None else _rounded(learner),
        "versions": trajectory.versions.tolist(),
        "loss_mask": trajectory.loss_mask.tolist(),
        "masked": trajectory.masked.astype(int).tolist(),
        "levels": levels_of(row, trajectory),
    }


def _rounded(values: np.ndarray) -> list[float | None]:
    """To the sixth digit: what float32 tells."""
    return [round(value, 6) if math.isfinite(value) else None for value in values.tolist()]


def _finite(value: Any) -> Any:
    """JSON has no NaN."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
