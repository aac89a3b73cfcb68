"""Rows of the demo of words: what a thing is, to be said in one short sentence; and the reward of such a sentence.

    python -m asyncrl_plugins.demos.sentences FOLDER [--seed 1]

`words.txt` has things that can be counted. 100 of them, the same whatever the seed is, are held out: no row of training
has one. Columns: prompt, answer (the word).
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from asyncrl.launch.command import command
from asyncrl.rewards.sample import RewardSample
from asyncrl_plugins.demos.command_line import folder_and_seed

WORDS = Path(__file__).parent / "words.txt"
HELD_OUT_WORDS = 100
SHORTEST, LONGEST = 5, 15
"""Words of a sentence: fewer are a fragment such as `A violin.`, which would be the easiest way to a reward."""
SENTENCE = re.compile(r"[A-Z][^.!?\n]*[.!?]")


def split_words() -> tuple[list[str], list[str]]:
    """Words of training, and held-out ones."""
    words = WORDS.read_text(encoding="utf-8").split()
    random.Random(0).shuffle(words)
    return words[HELD_OUT_WORDS:], words[:HELD_OUT_WORDS]


def row(word: str) -> dict[str, str]:
    article = "an" if word[0] in "aeiou" else "a"
    return {"prompt": f"What is {article} {word}? Answer in one short sentence.", "answer": word}


def short_sentence(sample: RewardSample) -> float:
    """1.0 if the completion is one sentence, from a capital letter to the only full stop, of SHORTEST to LONGEST words,
    and has the word that was asked for once. Whether it is true is not judged.

    Where the word could stand there twice, twenty steps taught `A shoe is a shoe.`"""
    text = sample.completion.strip()
    words = re.findall(r"[\w'-]+", text.lower())
    return float(
        SENTENCE.fullmatch(text) is not None and SHORTEST <= len(words) <= LONGEST and words.count(sample.answer) == 1
    )


def write_rows(folder: Path, seed: int) -> None:
    """Write FOLDER/rl.parquet, in the seed's order, and FOLDER/eval.parquet, the same for every seed."""
    training, held_out = split_words()
    random.Random(seed).shuffle(training)
    folder.mkdir(parents=True, exist_ok=True)
    for name, words in (("rl", training), ("eval", held_out)):
        pq.write_table(pa.Table.from_pylist([row(word) for word in words]), folder / f"{name}.parquet")


@command
def main(argv: Sequence[str] | None = None) -> int:
    write_rows(*folder_and_seed(argv, __doc__, "the order of training rows"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
