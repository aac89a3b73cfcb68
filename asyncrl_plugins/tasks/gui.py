"""One step in a graphical interface (GUI-R1): an action with a point or a text, for a screenshot and an instruction."""

from __future__ import annotations

import math
from typing import Any

from asyncrl.rewards.builtin import accepted_answers
from asyncrl.rewards.sample import RewardSample
from asyncrl_plugins.tasks.boxes import Scale, coordinates, image_size, shares
from asyncrl_plugins.tasks.completions import block, literal, think_then
from asyncrl_plugins.tasks.text_match import F1, token_f1

POINTS = ("click", "long_press", "doubleclick", "rightclick", "moveto")
"""Actions that are right by their point."""
TEXTS = ("type", "select", "open_app", "scroll")
"""Actions that are right by their text; that of scroll is a direction."""
NO_TEXT = "no input text"
DIRECTIONS = ("up", "down", "left", "right")


def gui_step(
    sample: RewardSample,
    *,
    scale: Scale = 1000,
    answer_scale: Scale = 1,
    radius: float = 0.14,
    least: float = 0.5,
    f1: F1 = "bag",
) -> dict[str, float]:
    """`step`: 1 if the action is the reference's, its point lies in the column `gt_bbox` (where that is a point: nearer
    than `radius` of the image's sides) and its text has a token F1 of `least` with `gt_input_text`. Clicks are asked
    for their point, type, select, scroll and open_app for their text. `type`: 1 if the action is the reference's.

    scale, answer_scale: units of the model's coordinates and of `gt_bbox` (1, 1000, or pixels).
    Example: "<answer>[{'action': 'click', 'point': [500, 20], 'input_text': 'no input text'}]</answer>", answer
    "click", gt_bbox [0.4, 0.0, 0.6, 0.1] -> 1
    """
    expected = accepted_answers(sample)[0].strip().lower()
    given = _action(sample)
    if given is None or str(given.get("action")).strip().lower() != expected:
        return {"step": 0.0, "type": 0.0}
    right = True
    if expected in POINTS:
        right = _hits(sample, given.get("point"), scale, answer_scale, radius)
    elif expected in TEXTS:
        wanted = sample.columns.get("gt_input_text")
        if not isinstance(wanted, str):
            raise ValueError(
                f"row {sample.row_id}: {expected} needs a text in the column gt_input_text, got {wanted!r}"
            )
        right = token_f1(str(given.get("input_text")), wanted, f1) >= least
    return {"step": float(right), "type": 1.0}


def gui_format(sample: RewardSample, *, opened_by_prompt: bool = False) -> float:
    """1 if the completion is thinking and an answer block with one action: `action`, `point` (two numbers) and
    `input_text`, which type, select and open_app need and which is a direction for scroll."""
    given = _action(sample)
    if not think_then(sample, opened_by_prompt=opened_by_prompt) or given is None:
        return 0.0
    action, text = given.get("action"), given.get("input_text")
    if not isinstance(action, str) or not isinstance(text, str) or coordinates(given.get("point"), 2) is None:
        return 0.0
    action, text = action.strip().lower(), text.strip().lower()
    if action == "scroll":
        return float(text in DIRECTIONS)
    return float(action not in TEXTS or text not in ("", NO_TEXT))


def _action(sample: RewardSample) -> dict[str, Any] | None:
    """The action of the answer block, by itself or alone in a list."""
    found = literal(block(sample.completion, "answer") or "")
    if isinstance(found, list) and len(found) == 1:
        found = found[0]
    return found if isinstance(found, dict) else None


def _hits(sample: RewardSample, point: Any, scale: Scale, answer_scale: Scale, radius: float) -> bool:
    target = sample.columns.get("gt_bbox")
    box, place = coordinates(target, 4), coordinates(target, 2)
    if box is None and place is None:
        raise ValueError(f"row {sample.row_id}: expected a box or a point in the column gt_bbox, got {target!r:.120}")
    given = coordinates(point, 2)
    if given is None:
        return False
    x, y = shares(given, image_size(sample, scale))
    whole = image_size(sample, answer_scale)
    if box is not None:
        x0, y0, x1, y1 = shares(box, whole)
        return x0 <= x <= x1 and y0 <= y <= y1
    left, top = shares(place or (), whole)
    return math.hypot(x - left, y - top) < radius
