"""Agreement of short answers in words: token F1 and exact match, as SQuAD and its followers count them."""

from __future__ import annotations

import re
import string
from collections import Counter
from typing import Literal

F1 = Literal["bag", "set"]
"""`bag` counts a token as often as both have it, as SQuAD does; `set` counts it once, as RLLaVA does."""

_IDEOGRAPH = re.compile(r"([\u3400-\u9fff\uf900-\ufaff])")
_PUNCTUATION = str.maketrans("", "", string.punctuation + "，。！？、；：（）《》“”‘’")
_ARTICLE = re.compile(r"\b(?:a|an|the)\b")


def tokens(text: str) -> list[str]:
    """Words in lower case without articles and punctuation; each Chinese character is a word."""
    plain = _ARTICLE.sub(" ", text.lower().translate(_PUNCTUATION))
    return _IDEOGRAPH.sub(r" \1 ", plain).split()


def exact(given: str, answer: str) -> float:
    """1 if both have the same tokens in the same order."""
    return float(tokens(given) == tokens(answer))


def token_f1(given: str, answer: str, f1: F1 = "bag") -> float:
    """Harmonic mean of precision and recall of tokens; where one text has none, 1 if the other has none either.

    Example: "red car, red car" for "red red car" has 3 tokens in common, so 6/7 (`set`: 2, so 4/7)
    """
    mine, theirs = tokens(given), tokens(answer)
    if not mine or not theirs:
        return float(mine == theirs)
    same = (Counter(mine) & Counter(theirs)).total() if f1 == "bag" else len(set(mine) & set(theirs))
    return 2 * same / (len(mine) + len(theirs))
