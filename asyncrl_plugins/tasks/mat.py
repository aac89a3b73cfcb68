"""One step of an agent (MAT): the next action, behind its thinking, compared with that of a recorded trajectory.

A search step is a query or the answer; a code step names what is wrong with the image, writes code, or answers.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Sequence
from typing import NamedTuple

from asyncrl.rewards.builtin import accepted_answers
from asyncrl.rewards.sample import RewardSample
from asyncrl_plugins.tasks.completions import after_thinking, block
from asyncrl_plugins.tasks.text_match import F1, exact, token_f1

SEARCH = ("search", "answer")
CODE = ("problem", "code", "answer")
ROTATIONS = ("rotation90", "rotation180")
_NAME = re.compile(r"'([^']+)'|\"([^\"]+)\"")
_FENCE = re.compile(r"```python\n(.*?)```", re.DOTALL)


class Action(NamedTuple):
    kind: str
    content: str


def search_step(sample: RewardSample, *, f1: F1 = "bag", least: float = 0.5) -> dict[str, float]:
    """`step`: for an answer its token F1; for a query its token F1 if that is `least` or more, else 0; 0 for the other
    kind of action, for both, or for none. `exact`: 1 if it is the same action in the same words.

    The reference is `<search>...</search>` or `<answer>...</answer>`, or the text of an answer; of several the best
    counts.
    f1: `bag`, or `set` as RLLaVA counts. RLLaVA compares queries by the cosine of sentence embeddings.
    """
    given = action_of(sample.completion, SEARCH)
    return _best([_search(given, reference, f1, least) for reference in _references(sample, SEARCH)])


def code_step(sample: RewardSample, *, f1: F1 = "bag", any_code: float = 0.9, half: float = 0.5) -> dict[str, float]:
    """`step`: for an answer its token F1; `any_code` for Python that can be parsed; for problems 1 if the set is the
    reference's, and `half` if of a rotation and another problem the rotation alone is named. 0 for another kind of
    action. `exact`: 1 if it is the same action in the same words, or the same set of problems.

    The code is read, never run. The reference is a `<problem>`, `<code>` or `<answer>` block, or the text of an answer.
    Example: reference "<problem> {'rotation90', 'dark'} </problem>": "<problem> {'rotation90'} </problem>" -> 0.5
    """
    given = action_of(sample.completion, CODE)
    return _best([_code(given, reference, f1, any_code, half) for reference in _references(sample, CODE)])


def action_of(completion: str, kinds: Sequence[str]) -> Action | None:
    """Single action after the thinking; None for no action, or several kinds of them."""
    text = after_thinking(completion)
    named = [kind for kind in kinds if f"<{kind}>" in text]
    content = block(completion, named[0]) if len(named) == 1 else None
    return None if content is None else Action(named[0], content)


def _references(sample: RewardSample, kinds: Sequence[str]) -> list[Action]:
    found: list[Action] = []
    for text in accepted_answers(sample):
        action = action_of(text, kinds)
        if action is None and any(f"<{kind}>" in text for kind in kinds):
            raise ValueError(f"row {sample.row_id}: expected one action of {kinds} in the reference, got {text!r:.120}")
        if action and action.kind == "problem" and not _problems(action.content):
            raise ValueError(f"row {sample.row_id}: expected names of problems in quotes, got {text!r:.120}")
        found.append(action or Action("answer", text))
    return found


def _best(scores: list[dict[str, float]]) -> dict[str, float]:
    return {name: max(score[name] for score in scores) for name in scores[0]}


def _search(given: Action | None, reference: Action, f1: F1, least: float) -> dict[str, float]:
    if given is None or given.kind != reference.kind:
        return {"step": 0.0, "exact": 0.0}
    overlap = token_f1(given.content, reference.content, f1)
    enough = given.kind == "answer" or overlap >= least
    return {"step": overlap if enough else 0.0, "exact": exact(given.content, reference.content)}


def _code(given: Action | None, reference: Action, f1: F1, any_code: float, half: float) -> dict[str, float]:
    if given is None or given.kind != reference.kind:
        return {"step": 0.0, "exact": 0.0}
    if given.kind == "problem":
        mine, theirs = _problems(given.content), _problems(reference.content)
        part = len(theirs) == 2 and mine in ([name] for name in ROTATIONS if name in theirs)
        same = float(mine == theirs)
        return {"step": max(same, half * part), "exact": same}
    if given.kind == "code":  # in which punctuation and case matter
        return {
            "step": any_code * _parses(given.content),
            "exact": float(given.content.split() == reference.content.split()),
        }
    return {
        "step": token_f1(given.content, reference.content, f1),
        "exact": exact(given.content, reference.content),
    }


def _problems(text: str) -> list[str]:
    """Names in quotes, each once, sorted."""
    return sorted({(single or double).strip() for single, double in _NAME.findall(text)})


def _parses(text: str) -> bool:
    """Whether there is a fenced block of Python in it that has a statement."""
    found = _FENCE.search(text)
    try:
        return found is not None and bool(ast.parse(textwrap.dedent(found[1])).body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
