"""Maths whose result stands in a box (geometry3k), compared by math-verify: `1/2` is `0.5`, `2x+3` is `3+2x`.

math-verify is an extra. Without it this file cannot be loaded, and a run says so before it begins.
"""

from __future__ import annotations

import logging
from typing import Any

from asyncrl.rewards.builtin import accepted_answers
from asyncrl.rewards.sample import RewardSample
from asyncrl_plugins.tasks.answers import last_boxed, same_latex
from asyncrl_plugins.tasks.completions import after_thinking

try:
    import math_verify  # pyright: ignore[reportMissingImports]
except ImportError as error:
    raise ImportError(
        "math-verify is not installed: pip install 'asyncrl[maths]'. What compares text and plain numbers alone is the "
        "reward boxed_match: name it in reward.functions"
    ) from error

MATH_VERIFY: Any = math_verify
"""Untyped math-verify: its annotations do not name None, which switches its own time limits off."""
logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that there is no time limit: reward.timeout_s is


def boxed(sample: RewardSample) -> float:
    """1 if the last `\\boxed{...}` after the thinking equals the answer (or one of a list of them).

    A comparison that takes longer than reward.timeout_s, or that math-verify cannot make, is a status and no 0.
    Example: "<think>...</think> \\boxed{0.5}", answer "\\frac{1}{2}" -> 1
    """
    given = last_boxed(after_thinking(sample.completion))
    return float(given is not None and any(equal(given, answer) for answer in accepted_answers(sample)))


def equal(given: str, answer: str) -> bool:
    """Equality as text, or else as mathematical expressions; `answer` is the reference (it is not symmetric)."""
    if same_latex(given, answer):
        return True
    expected, found = (_read(text) for text in (answer, given))
    return bool(MATH_VERIFY.verify(expected, found, timeout_seconds=None, raise_on_error=True))


def _read(text: str) -> Any:
    inner = last_boxed(text)
    return MATH_VERIFY.parse(
        f"\\boxed{{{text if inner is None else inner}}}", parsing_timeout=None, raise_on_error=True
    )


equal("1", "2")  # compiles its expressions and its grammar now: that takes longer than a sample has
