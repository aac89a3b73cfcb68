"""Rows of a notebook as a file that a run reads."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from PIL import Image

from asyncrl.config.sections import DataConfig
from asyncrl.data.dataset import open_train
from asyncrl.data.prompts import PromptRenderer
from asyncrl.errors import UserError
from asyncrl_plugins.python_api.rows import files_of

PIXELS = np.arange(8 * 6 * 3, dtype=np.uint8).reshape(8, 6, 3)
ROWS: list[dict[str, Any]] = [
    {"prompt": "<image>a", "answer": "1", "images": [Image.fromarray(PIXELS)]},
    {"prompt": "b", "answer": "2", "images": [], "kind": "blind"},
]


@pytest.mark.parametrize(
    "data",
    [
        ROWS,
        iter(ROWS),
        pd.DataFrame(ROWS),
        datasets.Dataset.from_list([{**row, "kind": row.get("kind")} for row in ROWS]),
    ],
    ids=["dicts", "iterator", "pandas", "datasets"],
)
def test_rows_and_images_arrive_as_they_were(data: Any, tmp_path: Path) -> None:
    files = files_of(data, tmp_path / "inputs", "train")
    config = DataConfig(train_files=tuple(files))
    rows = open_train(config)
    assert [rows[place].get("kind") for place in (0, 1)] == [None, "blind"]
    rendered = PromptRenderer(config).render(rows[0], "row")
    (image,) = rendered.blobs.values()
    with Image.open(BytesIO(image)) as shown:
        assert (np.asarray(shown.convert("RGB")) == PIXELS).all()


def test_files_stay_files_and_a_name_follows_the_contents(tmp_path: Path) -> None:
    assert files_of("train.jsonl", tmp_path, "train") == ["train.jsonl"]
    assert files_of([Path("a.parquet"), "b.csv"], tmp_path, "train") == ["a.parquet", "b.csv"]
    first, again, other = (files_of(rows, tmp_path, "train") for rows in (ROWS, ROWS, ROWS[:1]))
    assert first == again != other
    assert pq.read_table(first[0]).num_rows == 2


def test_images_stand_upright_and_in_colours_of_png(tmp_path: Path) -> None:
    """As the same photograph does from its file."""
    photo = Image.fromarray(PIXELS)
    exif = photo.getexif()
    exif[0x0112] = 6
    photo.save(tmp_path / "photo.jpg", exif=exif, quality=100)
    rows = [{"prompt": "a", "images": [Image.open(tmp_path / "photo.jpg"), photo.convert("CMYK")]}]
    (file,) = files_of(rows, tmp_path, "train")
    shown = [Image.open(BytesIO(data)) for data in pq.read_table(file)["images"][0].as_py()]
    assert [image.size for image in shown] == [(8, 6), (6, 8)]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ([{"meta": {}}], "cannot be a Parquet file"),
        ([{"n": 1 << 80}], "64 bits"),
        ([], "train has no rows"),
        ([1, 2], "train has no rows"),
        ([{"a": 1}, {"a": "x"}], "column"),
    ],
)
def test_what_is_no_table_is_refused_with_the_fix(data: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=says):
        files_of(data, tmp_path, "train")
