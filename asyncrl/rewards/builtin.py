"""The rewards that come with asyncrl. Each is an ordinary reward function; copy one to write your own.

All but `format_think`, `regex_match` and `soft_overlong` compare with `sample.answer` and raise ValueError where the
row has no usable answer: a broken row is an error to be shown, not a wrong completion.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Mapping
from typing import Any

from asyncrl.rewards.sample import RewardSample

NUMBER = re.compile(
    r"(?:(?<![\w).])[-+])?"  # a sign, but not the minus of `5-3`
    r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+|(?<!\d)(?=\.\d))"  # 1,234 or 1234 or nothing before .5
    r"(?:\.\d+)?(?:[eE][-+]?\d+)?"
)
"""A number in text."""


def exact_match(sample: RewardSample, *, ignore_case: bool = False) -> float:
    """1 if the completion is the answer (or one of a list of them), however it is spaced.

    Example: completion " Paris\\n", answer "Paris" -> 1
    """
    return float(_plain(sample.completion, ignore_case) in [_plain(a, ignore_case) for a in accepted_answers(sample)])


def contains(sample: RewardSample, *, ignore_case: bool = True, whole_words: bool = True) -> float:
    """1 if the answer (or one of a list of them) stands somewhere in the completion.

    Example: completion "The capital is Paris.", answer "paris" -> 1; answer "par" -> 0 (not a whole word)
    """
    completion = _plain(sample.completion, ignore_case)
    edges = (r"(?<!\w)(?<!\d\.)", r"(?!\w|\.\d)") if whole_words else ("", "")  # 5 is no word of 1.5 or 5.5
    answers = [re.escape(_plain(answer, ignore_case)) for answer in accepted_answers(sample)]
    return float(any(re.search(edges[0] + answer + edges[1], completion) for answer in answers))


def number_match(sample: RewardSample, *, tolerance: float = 1e-6, relative_tolerance: float = 0.0) -> float:
    """1 if the last number of the completion is the answer's, within either tolerance.

    The answer is a number or a text whose last number counts (GSM8K's `... #### 72`), or a list of them.
    Example: completion "5 - 3 = 2, so 1,002 in total.", answer 1002 -> 1
    """
    expected = list(map(last_number, accepted_answers(sample)))
    given = last_number(sample.completion)
    right = False
    for number in expected:
        if number is None:
            raise ValueError(f"row {sample.row_id}: number_match needs a number as answer, got {sample.answer!r}")
        right |= given is not None and abs(given - number) <= max(tolerance, relative_tolerance * abs(number))
    return float(right)


def format_think(sample: RewardSample, *, opened_by_prompt: bool = False) -> float:
    """1 if the completion is one `<think>reasoning</think>` and then an answer, neither of them blank.

    opened_by_prompt: the chat template has already written `<think>`.
    Example: "<think>3 + 4 = 7</think> 7" -> 1
    """
    text = ("<think>" if opened_by_prompt else "") + sample.completion.strip()
    if text.count("<think>") != 1 or text.count("</think>") != 1 or not text.startswith("<think>"):
        return 0.0
    thought, _, answer = text.removeprefix("<think>").partition("</think>")
    return float(bool(thought.strip()) and bool(answer.strip()))


def regex_match(sample: RewardSample, *, pattern: str, full: bool = False) -> float:
    """1 if the regular expression is found in the completion, or with `full` is all of it.

    Example: kwargs {pattern: "^Answer: \\\\d+$"}, completion "Answer: 12" -> 1
    """
    return float(bool((re.fullmatch if full else re.search)(pattern, sample.completion)))


def soft_overlong(sample: RewardSample, *, buffer: int | None = None) -> float:
    """0 down to -1 over the last `buffer` tokens before the limit of length (DAPO, arXiv 2503.14476, eq. 13).

    `buffer` is a fifth of the limit where it is left out, as in the paper: 4,096 of 20,480 tokens.
    Example: limit 20480: 16384 tokens -> 0, 18432 -> -0.5, 20480 -> -1
    """
    limit = length_limit(sample)
    buffer = max(1, limit // 5) if buffer is None else buffer
    if buffer <= 0:
        raise ValueError(f"buffer is {buffer}: give a number of tokens above 0")
    over = sample.num_tokens - (limit - buffer)
    return min(0.0, max(-1.0, -over / buffer))


BUILTIN_REWARDS: dict[str, Callable[..., Any]] = {
    "exact_match": exact_match,
    "contains": contains,
    "number_match": number_match,
    "format_think": format_think,
    "regex_match": regex_match,
    "soft_overlong": soft_overlong,
}


def length_limit(sample: RewardSample) -> int:
    """Most tokens that the completion could have. Raises ValueError where that is not known."""
    if sample.max_tokens <= 0:
        raise ValueError(f"row {sample.row_id}: the limit of length is not known (RewardSample.max_tokens is 0)")
    return sample.max_tokens


def accepted_answers(sample: RewardSample) -> list[str]:
    """The accepted answers as text; never empty.

    A number or a truth value has each text that says it: 5.0, as tables have whole numbers, is `5` and `5.0`.
    Raises ValueError for what no completion says: nothing, a blank, NaN, infinity, a map.
    """
    accepted: list[Any] = sample.answer if isinstance(sample.answer, list) else [sample.answer]
    texts = [text for answer in accepted for text in _texts(answer)]
    if not texts or not all(text.strip() for text in texts):
        raise ValueError(
            f"row {sample.row_id}: the answer is {sample.answer!r}, and text, a finite number, or a list of them is "
            "needed. Check data.answer_key"
        )
    return texts


def _texts(answer: Any) -> list[str]:
    """Texts that say an answer, the usual one first; blank where none does."""
    if isinstance(answer, Mapping | list | tuple | bytes) or answer is None:
        return [""]
    if isinstance(answer, bool):
        return [str(answer), str(answer).lower()]
    if isinstance(answer, float):
        if not math.isfinite(answer):
            return [""]
        if answer.is_integer():
            return [str(int(answer)), str(answer)]
        (as_float32,) = struct.unpack("f", struct.pack("f", answer)) if abs(answer) < 1e38 else (None,)
        if as_float32 == answer:  # a column of 32 bits has 0.10000000149 for 0.1
            return list(dict.fromkeys((f"{answer:.7g}", str(answer))))
    return [str(answer)]


def _plain(text: str, ignore_case: bool) -> str:
    spaced = " ".join(text.split())
    return spaced.casefold() if ignore_case else spaced


def last_number(text: str) -> float | None:
    """The last number of a text; None without one."""
    found = NUMBER.findall(text.replace("\N{MINUS SIGN}", "-"))
    return float(found[-1].replace(",", "")) if found else None
