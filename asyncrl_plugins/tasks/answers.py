"""Rewards of answers that are chosen by a letter, or written in a box. Either raises ValueError where the row has no
usable answer."""

from __future__ import annotations

import re

from asyncrl.rewards.builtin import NUMBER, accepted_answers, last_number
from asyncrl.rewards.sample import RewardSample

BOXED = "\\boxed{"


def choice_match(sample: RewardSample, *, choices: str = "ABCD") -> float:
    """1 if the completion chooses the answer's letter; the last of the clearest kind of statement counts.

    From clear to vague: `answer is B`, `\\boxed{B}`, `(B)` or `**B**`, a line beginning `B.`, a lone letter.
    Example: completion "A dog, so the answer is (B).", answer "B" -> 1
    """
    answers = [answer.strip().strip("().").upper() for answer in accepted_answers(sample)]
    if not all(len(answer) == 1 and answer in choices.upper() for answer in answers):
        raise ValueError(f"row {sample.row_id}: choice_match needs an answer among {choices!r}, got {sample.answer!r}")
    return float(chosen_letter(sample.completion, choices.upper()) in answers)


def boxed_match(sample: RewardSample) -> float:
    """1 if the last `\\boxed{...}` of the completion is the answer: as LaTeX text, or as a plain number.

    Spacing, `$`, `\\left`, `\\right` and `\\dfrac` make no difference; nothing is solved or simplified.
    Example: completion "so \\boxed{\\dfrac{1}{2}}", answer "\\frac{1}{2}" -> 1
    """
    answers = accepted_answers(sample)
    given = last_boxed(sample.completion)
    return float(given is not None and any(same_latex(given, answer) for answer in answers))


def chosen_letter(completion: str, choices: str) -> str:
    """The letter that a text chooses, as `choice_match` says; empty if none."""
    letter = f"([{re.escape(choices)}])"
    alone = re.fullmatch(rf"\W*{letter}\W*", completion, re.IGNORECASE)
    if alone:
        return alone[1].upper()
    for pattern in (
        rf"(?i:answer)\W*(?:(?i:is)\b)?[^\w]*{letter}(?!\w)",
        rf"\\boxed\{{\W*(?:\\text\{{)?{letter}\W*\}}",
        rf"(?:\(|\*\*){letter}(?:\)|\*\*)",
        rf"(?m:^)\s*{letter}[.):]",
        rf"(?<![\w']){letter}(?![\w']|\s+[a-z])",  # not the article of `A dog`
    ):
        found = re.findall(pattern, completion)
        if found:
            return found[-1]
    return ""


def last_boxed(text: str) -> str | None:
    """The content of the last `\\boxed{...}`; None without a closed one."""
    start = text.rfind(BOXED)
    if start < 0:
        return None
    start += len(BOXED)
    depth = 1
    for at in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0) if text[at - 1] != "\\" else 0
        if depth == 0:
            return text[start:at]
    return None


def same_latex(given: str, answer: str) -> bool:
    """Equality as LaTeX text, or as plain numbers."""
    left, right = (_plain_latex(text) for text in (given, answer))
    if left == right:
        return True
    if NUMBER.fullmatch(left) and NUMBER.fullmatch(right):
        return last_number(left) == last_number(right)
    return False


def _plain_latex(text: str) -> str:
    """LaTeX without spacing and sizing commands, and without the `\\boxed{}` or `$` around an answer."""
    boxed = last_boxed(text)
    text = boxed if boxed is not None else text
    text = re.sub(r"\\(?:left|right)(?![a-zA-Z])|\\[,;:! ]|[\s$]", "", text)
    return re.sub(r"\\[dt]frac", r"\\frac", text).rstrip(".")
