"""Rows that a small language model answers at length, to measure speed by: `python -m benchmarks.story_rows FILE`."""

from __future__ import annotations

import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from asyncrl_plugins.demos.sentences import split_words


def main() -> None:
    rows = [{"prompt": f"Write a long story about {word}.", "answer": word} for word in split_words()[0]]
    pq.write_table(pa.Table.from_pylist(rows), Path(sys.argv[1]))


if __name__ == "__main__":
    main()
