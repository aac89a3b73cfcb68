"""Rows of easy-VQA (package easy-vqa, MIT): 5,000 pictures of one shape each, with 48,248 questions and 13 answers.

    python -m asyncrl_plugins.demos.easy_vqa FOLDER [--seed 1]

Pictures 0 to 999 of the training split are for demonstrations, the others for reinforcement learning, and the test
split is held out. Yes and no are equally frequent in each kind of question, except in `test_all.parquet`: in the
benchmark "is there a red shape?" is answered no 88 times of 100, so that a policy could learn the prior instead.

Columns: images (one PNG), prompt, answer, kind (attribute asked for, and whether the question is negated), picture
(number), colour, shape, target (a demonstration, `not red? blue. Answer: yes`). The benchmark does not say what a
picture shows: colour and shape follow from its questions. They are empty where these leave them open, which is so in
`test_all.parquet` alone.
"""

from __future__ import annotations

import json
import random
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from asyncrl.launch.command import command
from asyncrl_plugins.demos.command_line import folder_and_seed
from asyncrl_plugins.demos.packages import package_folder

COLOURS = ("black", "gray", "red", "green", "blue", "teal", "brown", "yellow")
SHAPES = ("rectangle", "circle", "triangle")
DEMONSTRATED = 1000
"""Training pictures that demonstrations show; reinforcement learning has the others."""
HELD_OUT_ROWS = 200

Question = tuple[str, str, int]
"""Text, answer, number of the picture."""


def questions(split: str) -> list[Question]:
    """Questions of `train` or `test`, in the benchmark's order."""
    file = package_folder("easy_vqa") / "data" / split / "questions.json"
    return [(text, answer, int(picture)) for text, answer, picture in json.loads(file.read_text(encoding="utf-8"))]


def pictures(split: str) -> dict[int, bytes]:
    """PNG files by number."""
    files = (package_folder("easy_vqa") / "data" / split / "images").glob("*.png")
    return {int(file.stem): file.read_bytes() for file in files}


def seen_in(asked: Iterable[Question]) -> dict[int, tuple[str, str]]:
    """(colour, shape) of each picture as its questions and answers tell, of those that they tell both."""
    possible: dict[int, tuple[set[str], set[str]]] = defaultdict(lambda: (set(COLOURS), set(SHAPES)))
    for text, answer, picture in asked:
        words = _words(text)
        is_there = words[0] in ("what", "which") or (answer == "yes") != _is_negated(words)
        for word in [answer, *words]:
            for values in possible[picture]:
                if word in values:
                    values.intersection_update({word}) if is_there else values.discard(word)
    return {
        picture: (*colour, *shape)  # type: ignore[misc]
        for picture, (colour, shape) in possible.items()
        if len(colour) == len(shape) == 1
    }


def kind_of(text: str) -> str:
    """`colour` and `shape` of what-questions; `is colour`, `is not colour`, ... of yes-or-no questions."""
    words = _words(text)
    named = "colour" if set(words) & set(COLOURS) else "shape"
    if words[0] == "what":
        # "what is the red shape?" asks for its shape, "what color is the circle?" for its colour.
        return "colour" if "color" in words else "shape"
    return f"is {'not ' if _is_negated(words) else ''}{named}"


def thought(text: str, answer: str, colour: str, shape: str) -> str:
    """A demonstration: the question restated beside what the picture shows, and the answer."""
    kind, words = kind_of(text), _words(text)
    attribute = kind.split()[-1]
    value = colour if attribute == "colour" else shape
    if " " not in kind:
        return f"{'color' if attribute == 'colour' else attribute}? {value}. Answer: {answer}"
    asked = next(word for word in words if word in (COLOURS if attribute == "colour" else SHAPES))
    return f"{'not ' if ' not ' in kind else ''}{asked}? {value}. Answer: {answer}"


def _words(text: str) -> list[str]:
    return re.findall("[a-z]+", text)


def _is_negated(words: Sequence[str]) -> bool:
    return bool({"not", "no"} & set(words))


def rows(split: str) -> list[dict[str, Any]]:
    """Rows of a split in the benchmark's order."""
    asked, files = questions(split), pictures(split)
    seen = seen_in(asked)
    found = []
    for text, answer, picture in asked:
        colour, shape = seen.get(picture, ("", ""))
        found.append(
            {
                "images": [files[picture]],
                "prompt": f"<image>{text.capitalize()}",
                "answer": answer,
                "kind": kind_of(text),
                "picture": picture,
                "colour": colour,
                "shape": shape,
                "target": thought(text, answer, colour, shape) if colour else "",
            }
        )
    return found


def balanced(found: Sequence[dict[str, Any]], rng: random.Random) -> list[dict[str, Any]]:
    """Equally many rows with yes and no in each kind of question; of the other kinds half as many as of one answer."""
    by_answer: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in found:
        by_answer[row["kind"], row["answer"] if row["answer"] in ("yes", "no") else ""].append(row)
    size = min(len(each) for (_, answer), each in by_answer.items() if answer)
    chosen = [
        row
        for (_, answer), each in sorted(by_answer.items())
        for row in rng.sample(each, min(len(each), size if answer else size // 2))
    ]
    rng.shuffle(chosen)
    return chosen


def write_rows(folder: Path, seed: int) -> dict[str, int]:
    """Write the Parquet files; returns their numbers of rows. `captions.parquet` has each training picture once."""
    rng = random.Random(seed)
    train, test = rows("train"), rows("test")
    known = [row for row in train if row["target"]]
    tables = {
        "captions": list({row["picture"]: row for row in known}.values()),
        "sft": balanced([row for row in known if row["picture"] < DEMONSTRATED], rng),
        "rl": balanced([row for row in known if row["picture"] >= DEMONSTRATED], rng),
        "eval": balanced([row for row in test if row["target"]], random.Random(0))[:HELD_OUT_ROWS],
        "test_all": test,
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, found in tables.items():
        pq.write_table(pa.Table.from_pylist(found), folder / f"{name}.parquet")
    return {name: len(found) for name, found in tables.items()}


@command
def main(argv: Sequence[str] | None = None) -> int:
    written = write_rows(*folder_and_seed(argv, __doc__, "the order and choice of training rows"))
    print(", ".join(f"{name} {size}" for name, size in written.items()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
