"""Parts of a completion: the thinking, what follows it, and the values that stand there.

Nothing that a model wrote is ever run: `literal` reads JSON and Python's literals.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

from asyncrl.rewards.builtin import format_think
from asyncrl.rewards.sample import RewardSample
from asyncrl_plugins.tasks.answers import last_boxed
from protocol.nesting import read_json


def think_then(sample: RewardSample, *, blocks: Sequence[str] = ("answer",), opened_by_prompt: bool = False) -> float:
    """1 if the completion is `<think>reasoning</think>` and one of the blocks, such as `<answer>7</answer>`.

    There is nothing else, neither part is blank, and no tag stands twice, in the thinking neither.
    opened_by_prompt: the chat template has already written `<think>`.
    """
    text = ("<think>" if opened_by_prompt else "") + sample.completion.strip()
    thought, _, rest = text.removeprefix("<think>").partition("</think>")
    rest = rest.strip()
    tags = [f"<{slash}{name}>" for name in blocks for slash in ("", "/")]
    if not text.startswith("<think>") or any(text.count(tag) != 1 for tag in ("<think>", "</think>")):
        return 0.0
    if sum(map(text.count, tags)) != 2 or not thought.strip():
        return 0.0
    inner = (
        rest.removeprefix(f"<{name}>").removesuffix(f"</{name}>")
        for name in blocks
        if rest.startswith(f"<{name}>") and rest.endswith(f"</{name}>")
    )
    return float(any(content.strip() for content in inner))


def think_boxed(sample: RewardSample, *, opened_by_prompt: bool = False) -> float:
    """1 if the completion is `<think>reasoning</think>` and text with a `\\boxed{...}` that is closed."""
    if not format_think(sample, opened_by_prompt=opened_by_prompt):
        return 0.0
    return float(last_boxed(after_thinking(sample.completion)) is not None)


def after_thinking(completion: str) -> str:
    """Text after the last `</think>`; the whole text where there is none."""
    return completion.rpartition("</think>")[2]


def block(completion: str, name: str) -> str | None:
    """The content of the last closed `<name>...</name>` after the thinking; None without one."""
    text = after_thinking(completion)
    end = text.rfind(f"</{name}>")
    start = text.rfind(f"<{name}>", 0, end) if end >= 0 else -1
    return text[start + len(name) + 2 : end].strip() if start >= 0 else None


def answer_text(completion: str) -> str:
    """The answer block, or without one all that follows the thinking: then this has to be the answer and no more."""
    found = block(completion, "answer")
    return after_thinking(completion).strip() if found is None else found


def literal(text: str) -> Any:
    """The value of a JSON or Python literal; None for any other text."""
    try:
        return read_json(text)
    except ValueError:
        pass
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None
