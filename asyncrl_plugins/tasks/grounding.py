"""Grounding (RefCOCO, RefCOCO+, RefCOCOg, LISA): one box for what a sentence describes."""

from __future__ import annotations

from asyncrl.rewards.sample import RewardSample
from asyncrl_plugins.tasks.boxes import Scale, box_in, image_size, iou, reference_box, shares
from asyncrl_plugins.tasks.completions import block

THRESHOLDS = (10, 30, 50, 75, 95)
"""Per cent of IoU from which a box counts as right."""


def box(sample: RewardSample, *, scale: Scale = 1000, answer_scale: Scale = 1000) -> dict[str, float]:
    """Agreement of the first box in the answer block with the reference: `iou`, `iou_squared`, and 0 or 1 for `iou_10`,
    `iou_30`, `iou_50`, `iou_75`, `iou_95` (an IoU from 0.1, ...) and `centre` (its centre lies in the reference).

    A box in the thinking, or in no answer block, counts for nothing.
    scale, answer_scale: units of the model's coordinates and of the reference's (1, 1000, or pixels).
    Example: "<answer>[0, 0, 500, 1000]</answer>", answer [0, 0, 1000, 1000] -> iou 0.5, iou_squared 0.25, iou_50 1
    """
    expected = shares(reference_box(sample.answer, sample.row_id), image_size(sample, answer_scale))
    found = box_in(block(sample.completion, "answer") or "")
    given = shares(found, image_size(sample, scale)) if found else (0.0, 0.0, 0.0, 0.0)
    overlap = iou(given, expected)
    x, y = (given[0] + given[2]) / 2, (given[1] + given[3]) / 2
    inside = found is not None and expected[0] <= x <= expected[2] and expected[1] <= y <= expected[3]
    right = {f"iou_{percent}": float(overlap >= percent / 100) for percent in THRESHOLDS}
    return {"iou": overlap, "iou_squared": overlap**2, **right, "centre": float(inside)}
