"""Open-vocabulary detection (Visual-RFT): every box of a category, each with a confidence."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from asyncrl.rewards.sample import RewardSample
from asyncrl_plugins.tasks.boxes import Box, coordinates, iou
from asyncrl_plugins.tasks.completions import answer_text, block, literal

_OBJECT = re.compile(r"\{[^{}]*\}")
MALFORMED: Box = (0.0, 0.0, 0.0, 0.0)


class Detection(NamedTuple):
    box: Box
    confidence: float
    """0 to 1; of an object that cannot be read it does not matter: it earns nothing."""


def detections(sample: RewardSample, *, threshold: float = 0.5) -> dict[str, float]:
    """Agreement of a list of `{'Position': [x0, y0, x1, y1], 'Confidence': c}` with the reference's list.

    Predictions, the surest first, take the free reference box of highest IoU, if this is above `threshold`.
    `overlap`: sum of the IoU of those matched over max(number of references, number of predictions), so a box that is
    given twice costs. `confidence`: mean of c where matched and 1 - c where not. `precision`, `recall`.
    An empty list is right (all 1) where the reference is empty. An object that cannot be read, or whose confidence is
    outside 0 to 1, is a prediction that earns nothing; one that is cut off at the end of the list is left out.
    Example: one reference, predicted exactly with 0.9 and another box with 0.3 -> overlap 0.5, confidence 0.8
    """
    expected = [_detection(piece, 1.0) for piece in _OBJECT.findall(answer_text(str(sample.answer)))]
    if MALFORMED in (found.box for found in expected):
        raise ValueError(f"row {sample.row_id}: expected a list of objects with a Position, got {sample.answer!r:.120}")
    answer = block(sample.completion, "answer")
    if answer is None:
        return dict.fromkeys(("overlap", "confidence", "precision", "recall"), 0.0)
    given = [_detection(piece, None) for piece in _OBJECT.findall(answer)]
    if not given and not expected:
        return dict.fromkeys(("overlap", "confidence", "precision", "recall"), 1.0)
    matched = _match(given, [one.box for one in expected], threshold)
    hits = sum(overlap > 0 for overlap, _ in matched)
    return {
        "overlap": sum(overlap for overlap, _ in matched) / max(len(given), len(expected)),
        "confidence": sum(earned for _, earned in matched) / len(given) if given else 0.0,
        "precision": hits / len(given) if given else 0.0,
        "recall": hits / len(expected) if expected else 0.0,
    }


def _match(given: Sequence[Detection], expected: Sequence[Box], threshold: float) -> list[tuple[float, float]]:
    """IoU with its match (0 without one) and what the confidence earns, of each prediction."""
    free = dict(enumerate(expected))
    earned: list[tuple[float, float]] = []
    for box, confidence in sorted(given, key=lambda one: -one.confidence):
        overlap, place = max(((iou(box, other), place) for place, other in free.items()), default=(0.0, -1))
        if box == MALFORMED:
            earned.append((0.0, 0.0))
        elif overlap > threshold:
            del free[place]
            earned.append((overlap, confidence))
        else:
            earned.append((0.0, 1.0 - confidence))
    return earned


def _detection(piece: str, confidence_without: float | None) -> Detection:
    """An object of a list. One without a confidence has the given one; None makes it one that cannot be read."""
    found = literal(piece)
    position = coordinates(found.get("Position"), 4) if isinstance(found, dict) else None
    confidence = coordinates([found.get("Confidence", confidence_without)], 1) if isinstance(found, dict) else None
    if position is None or confidence is None or not 0 <= confidence[0] <= 1:
        return Detection(MALFORMED, 0.0)
    x0, y0, x1, y1 = position
    return Detection((x0, y0, x1, y1), confidence[0])
