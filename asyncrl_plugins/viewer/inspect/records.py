"""Samples as plain JSON values, for `--json` and for the page."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

import numpy as np

from asyncrl_plugins.viewer.inspect.pictures import image_facts
from asyncrl_plugins.viewer.inspect.token_levels import telling_colouring, token_levels
from asyncrl_plugins.viewer.samples.model import SampleDetail, SampleRow, ShownMessage, TrajectoryDetail
from protocol.messages import TokenSource


def row_record(row: SampleRow) -> dict[str, Any]:
    """Convert a row of a list."""
    return {name: _finite(value) for name, value in asdict(row).items()} | {"origin": row.origin}


def detail_record(detail: SampleDetail) -> dict[str, Any]:
    """Convert a group: its prompt, images (without bytes) and completions, with a value of every column per token."""
    trajectories = [_trajectory(trajectory) for trajectory in detail.trajectories]
    return {
        **{name: getattr(detail, name) for name in ("ticket_id", "step", "server_id", "row_id", "messages", "answer")},
        "prompt": detail.messages[-1]["content"],
        "problem": detail.problem,
        "quantization": detail.quantization,
        "opening": [_shown(message) for message in detail.opening],
        "images": [asdict(image_facts(image)) for image in detail.images],
        "colouring": telling_colouring(trajectory["levels"] for trajectory in trajectories),
        "trajectories": trajectories,
    }


def _trajectory(trajectory: TrajectoryDetail) -> dict[str, Any]:
    row, learner = trajectory.row, trajectory.learner_logprobs
    names = (
        "trajectory", "status", "finish_reason", "reward", "advantage", "error", "length", "staleness",
        "logprob_diff_max", "origin", "put_there", "greedy",
    )  # fmt: skip
    return {
        **{name: _finite(getattr(row, name)) for name in names},
        "rewards": {name: _finite(value) for name, value in trajectory.rewards.items()},
        "consumed_at": trajectory.consumed_at,
        "tokens": trajectory.tokens,
        "token_ids": trajectory.token_ids.tolist(),
        "logprobs": _rounded(np.where(trajectory.is_sampled, trajectory.logprobs, np.nan)),
        "learner_logprobs": None if learner is None else _rounded(learner),
        "versions": trajectory.versions.tolist(),
        "source": [TokenSource(source).name.lower() for source in trajectory.source.tolist()],
        "masked": trajectory.masked.astype(int).tolist(),
        "levels": token_levels(trajectory),
        "limit": trajectory.limit,
        "turns": [
            {
                **{name: getattr(turn, name) for name in ("start", "end", "finish_reason", "context")},
                "reward": _finite(turn.reward),
                "versions": sorted(set(trajectory.versions[turn.start : turn.end].tolist())),
                "calls": [call.model_dump() for call in turn.calls],
                "info": json.loads(turn.info) if turn.info else {},
                "shown": [_shown(message) for message in turn.shown],
            }
            for turn in trajectory.turns
        ],
    }


def _shown(message: ShownMessage) -> dict[str, Any]:
    """Texts as they are, images by their facts."""
    return {"role": message.role, "parts": [p if isinstance(p, str) else asdict(image_facts(p)) for p in message.parts]}


def _rounded(values: np.ndarray) -> list[float | None]:
    """Round to six digits, which is what float32 holds; None where a value is not finite."""
    return [round(value, 6) if math.isfinite(value) else None for value in values.tolist()]


def _finite(value: Any) -> Any:
    """Replace NaN and infinities, which JSON has not, by None."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
