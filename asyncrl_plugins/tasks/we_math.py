"""We-Math: options and values, with credit for parts, and the benchmark's four dimensions of scored rows.

asyncrl eval CONFIG we_math --model FOLDER --out scores.jsonl data.val_files=[...]
python -m asyncrl_plugins.tasks.we_math scores.jsonl
"""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from asyncrl.rewards.builtin import NUMBER
from asyncrl.rewards.sample import RewardSample
from asyncrl_plugins.tasks.answers import chosen_letter
from asyncrl_plugins.tasks.completions import after_thinking, answer_text, block
from asyncrl_plugins.tasks.maths import equal
from protocol.nesting import read_json

LETTERS = "ABCDEFGH"
_MARK = re.compile(r"(?:^|\s)\((\d+)\)")
_OR = re.compile(r"\s+or\s+", re.IGNORECASE)
_WORDS = re.compile(r"\w[\w.%°/-]*(?:\s+\w[\w.%°/-]*)+")
_LIST = re.compile(r"[^,\\(\[{]+(?:,[^,\\(\[{]+)+")


def graded(sample: RewardSample) -> float:
    """1 for the right option, in the answer block or else in what follows the thinking; of values the share of the
    reference's parts that stand in their place. Parts are `(1) ... (2) ...`, or separated by commas or spaces; too many
    cost as much as too few. Of `30 or 150` either is all. The reference may be the JSON of a test row.

    Example: "<answer>8, 6, 5</answer>", answer "8, 6" -> 2/3
    """
    answer = _reference(sample)
    if len(answer) == 1 and answer in LETTERS:
        said = block(sample.completion, "answer")
        return float(chosen_letter(after_thinking(sample.completion) if said is None else said, LETTERS) == answer)
    given = answer_text(sample.completion)
    if _OR.search(answer):
        return float(any(_same(given, one) for one in _OR.split(answer)))
    wanted = _parts(answer, answer)
    if len(wanted) < 2:
        return float(_same(given, answer))
    parts = _parts(given, answer)  # never as a whole: `5 3` and `3 5` are the same product
    return sum(map(_same, parts, wanted)) / max(len(wanted), len(parts))


def four_dimensions(rows: Iterable[tuple[Any, str, bool]]) -> dict[str, float]:
    """We-Math's metrics (arXiv 2407.01284) of rows with problem, key (`2steps_1`, ..., `3steps_multi`) and correctness.

    With the steps and the whole problem: IK (insufficient knowledge) a step and the whole are wrong; IG (inadequate
    generalisation) all steps are right, the whole is wrong; RM (rote memorisation) the whole is right although some
    (strict) or all (loose) steps are wrong; CM (complete mastery) the whole is right with all (strict) or some (loose)
    steps. score = (N - 0.5 IG - RM - IK) / N; IK, IG and CM are shares of N, RM of RM + CM. A problem that misses a row
    is left out, and counted in `incomplete`.
    """
    problems: dict[tuple[str, str], dict[str, bool]] = defaultdict(dict)
    for problem, key, right in rows:
        size, _, part = key.partition("_")
        if size in ("2steps", "3steps"):
            problems[str(problem), size][part] = right
    counts: dict[str, int] = dict.fromkeys(
        ("n", "ik", "ig", "rm_strict", "rm_loose", "cm_strict", "cm_loose", "incomplete"), 0
    )
    for (_, size), parts in problems.items():
        if set(parts) != {*map(str, range(1, int(size[0]) + 1)), "multi"}:
            counts["incomplete"] += 1
            continue
        whole = parts.pop("multi")
        some, every = any(parts.values()), all(parts.values())
        counts["n"] += 1
        counts["ik"] += not whole and not every
        counts["ig"] += not whole and every
        counts["rm_strict"] += whole and not every
        counts["cm_strict"] += whole and every
        counts["rm_loose"] += whole and not some
        counts["cm_loose"] += whole and some
    return _rates(counts)


def _rates(counts: Mapping[str, int]) -> dict[str, float]:
    n = counts["n"]
    if not n:
        return {"problems": 0.0, "incomplete": float(counts["incomplete"])}
    rates = {"problems": float(n), "incomplete": float(counts["incomplete"])}
    rates |= {name: counts[name] / n for name in ("ik", "ig", "cm_strict", "cm_loose")}
    for kind in ("strict", "loose"):
        memorised, right = counts[f"rm_{kind}"], counts[f"rm_{kind}"] + counts[f"cm_{kind}"]
        rates[f"rm_{kind}"] = memorised / right if right else 0.0
        rates[f"score_{kind}"] = (n - 0.5 * counts["ig"] - memorised - counts["ik"]) / n
    return rates


def _reference(sample: RewardSample) -> str:
    fields = _test_row(sample.answer)
    answer = str(fields["answer"] if fields else sample.answer).strip()
    if sample.answer is None or not answer:
        raise ValueError(f"row {sample.row_id}: the answer is {sample.answer!r}. Check data.answer_key")
    return answer


def _test_row(answer: Any) -> dict[str, Any] | None:
    """Fields of a reference that is the JSON of answer, ID and key."""
    if not isinstance(answer, str) or not answer.lstrip().startswith("{"):
        return None
    try:
        fields = read_json(answer)
    except ValueError:
        return None
    return fields if "answer" in fields else None


def _parts(text: str, reference: str) -> list[str]:
    """A text cut as the reference is: by numbers in brackets, commas or spaces. An expression stays whole."""
    if len(_MARK.findall(reference)) > 1:
        return [part.strip() for part in _MARK.split(text)[2::2]]
    if NUMBER.fullmatch(reference) or not (_WORDS.fullmatch(reference) or _LIST.fullmatch(reference)):
        return [text]
    commas = "," in reference and "," in text  # values of a list may have spaces in them
    return [part for part in (text.split(",") if commas else re.split(r"[,\s]+", text)) if part.strip()]


def _same(given: str, answer: str) -> bool:
    given, answer = given.strip(), answer.strip()
    return given.casefold() == answer.casefold() or equal(given, answer)


def scored_rows(file: Path) -> Iterable[tuple[Any, str, bool]]:
    """Problem, key and correctness of each completion of `asyncrl eval --out`."""
    for line in file.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        fields = _test_row(row["answer"]) or row["columns"]
        if row["components"] is not None:
            yield fields["ID"], fields["key"], row["components"]["graded"] == 1


if __name__ == "__main__":
    for name, rate in four_dimensions(scored_rows(Path(sys.argv[1]))).items():
        print(f"{name:12} {rate:.4f}")
