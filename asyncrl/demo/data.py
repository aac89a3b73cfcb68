"""Make the handwritten-digit task as parquet files.

Every row is one PNG image with two handwritten digits, a question about them, and its answer. The digits
are the 1797 scans of 8x8 pixels that ship inside scikit-learn, drawn with a random size, rotation, shear, position,
contrast, blur and noise. The scans are first divided once into a training and a held-out part, so a held-out image
never shows a scan that any training image shows.

Columns: images (list of PNG bytes), prompt, answer, target (a demonstration for supervised training), digits ("3 7"),
kind (which question).

    python -m asyncrl.demo.data --out data --seed 0
"""

from __future__ import annotations

import argparse
import io
import math
import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image, ImageFilter

SPLIT_SEED = 1234
CHUNK_ROWS = 250
"""Rows that a worker draws at a time, in about half a second."""
QUESTIONS = {
    "read": "Which digits are these?",
    "sum": "What is the sum of the digits?",
    "difference": "What is the larger digit minus the smaller?",
    "product": "What is the product of the digits?",
}
ARITHMETIC = ("sum", "difference", "product")


@dataclass(frozen=True)
class Layout:
    """How an image is drawn. Sizes are in pixels, angles in degrees."""

    height: int = 28
    width: int = 56
    digits: int = 2
    min_size: int = 20
    max_size: int = 27
    max_rotation: float = 12.0
    max_shear: float = 0.2
    max_blur: float = 0.6
    max_noise: float = 12.0
    min_contrast: float = 0.7


def load_scans() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Return ((training scans, labels), (held-out scans, labels)); scans are uint8 arrays of 8x8."""
    from sklearn.datasets import load_digits  # a second, which workers need not wait
    from sklearn.model_selection import train_test_split

    bunch: Any = load_digits()
    scans = np.clip(bunch.images * (255.0 / 16.0), 0, 255).astype(np.uint8)
    split: Any = train_test_split(scans, bunch.target, test_size=0.3, random_state=SPLIT_SEED, stratify=bunch.target)
    train_x, held_x, train_y, held_y = split
    return (train_x, train_y), (held_x, held_y)


def draw_digit(
    scan: np.ndarray, size: float, centre: tuple[float, float], layout: Layout, rng: np.random.Generator
) -> np.ndarray:
    """Draw one scan, distorted, on an empty canvas with its middle at `centre` (x, y)."""
    angle = np.deg2rad(rng.uniform(-layout.max_rotation, layout.max_rotation))
    shear = rng.uniform(-layout.max_shear, layout.max_shear)
    scale_x = size / 8.0 * rng.uniform(0.85, 1.1)
    scale_y = size / 8.0
    rotate = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    forward = rotate @ np.array([[1.0, shear], [0.0, 1.0]]) @ np.diag([scale_x, scale_y])
    inverse = np.linalg.inv(forward)
    # The scan gets a dark border of two pixels, so that interpolation fades out at its edges.
    offset = np.array([6.0, 6.0]) - inverse @ np.array(centre)
    coefficients = (*inverse[0], offset[0], *inverse[1], offset[1])
    padded = Image.fromarray(np.pad(scan, 2))
    drawn = padded.transform(
        (layout.width, layout.height), Image.Transform.AFFINE, coefficients, Image.Resampling.BICUBIC
    )
    return np.asarray(drawn, dtype=np.float32)


def draw_image(scans: list[np.ndarray], layout: Layout, rng: np.random.Generator) -> bytes:
    """Draw the scans from left to right in a random layout and return PNG bytes."""
    canvas = np.zeros((layout.height, layout.width), dtype=np.float32)
    slot = layout.width / len(scans)
    for index, scan in enumerate(scans):
        size = rng.uniform(layout.min_size, layout.max_size)
        slack_x = max(0.0, (slot - 0.8 * size) / 2)
        slack_y = max(0.0, (layout.height - size) / 2)
        centre = (
            (index + 0.5) * slot + rng.uniform(-slack_x, slack_x),
            layout.height / 2 + rng.uniform(-slack_y, slack_y),
        )
        canvas = np.maximum(canvas, draw_digit(scan, size, centre, layout, rng))
    blurred = Image.fromarray(canvas.clip(0, 255).astype(np.uint8)).filter(
        ImageFilter.GaussianBlur(rng.uniform(0.0, layout.max_blur))
    )
    contrast = rng.uniform(layout.min_contrast, 1.0)
    background = rng.uniform(0.0, 255.0 * (1.0 - contrast))
    pixels = np.asarray(blurred, dtype=np.float32) * contrast + background
    pixels += rng.normal(0.0, rng.uniform(0.0, layout.max_noise), pixels.shape)
    image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).convert("RGB")
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()


def solve(kind: str, digits: list[int]) -> int:
    """Return the answer to a question of arithmetic."""
    match kind:
        case "sum":
            return sum(digits)
        case "difference":
            return max(digits) - min(digits)
        case "product":
            return math.prod(digits)
    raise ValueError(f"unknown question kind {kind!r}")


def make_rows(
    indices: range, scans: np.ndarray, labels: np.ndarray, seed: int, layout: Layout, reading_share: float
) -> list[dict[str, object]]:
    """Make these rows of a part. `reading_share` of them ask which digits are there, the others for arithmetic."""
    by_label = [np.flatnonzero(labels == label) for label in range(10)]
    rows: list[dict[str, object]] = []
    for index in indices:
        rng = np.random.default_rng([seed, index])  # of the row: whoever draws it draws the same
        digits = rng.integers(0, 10, layout.digits).tolist()
        reading = " ".join(map(str, digits))
        chosen = [scans[rng.choice(by_label[digit])] for digit in digits]
        image = draw_image(chosen, layout, rng)
        kind = "read" if rng.random() < reading_share else ARITHMETIC[index % len(ARITHMETIC)]
        answer = reading if kind == "read" else str(solve(kind, digits))
        target = f"read {reading}" + ("" if kind == "read" else f" answer {answer}")
        rows.append(
            {
                "images": [image],
                "prompt": QUESTIONS[kind],
                "answer": answer,
                "target": target,
                "digits": reading,
                "kind": kind,
            }
        )
    return rows


def draw_in_parallel(count: int, *arguments: Any) -> list[dict[str, object]]:
    """The first `count` rows of `make_rows`, drawn on every core if they are many."""
    chunks = [range(count)[start : start + CHUNK_ROWS] for start in range(0, count, CHUNK_ROWS)]
    make = partial(_make_rows, arguments)
    if len(chunks) < 4:
        return [row for chunk in chunks for row in make(chunk)]
    # Not forked: a caller may have threads.
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), multiprocessing.get_context("spawn")) as workers:
        return [row for rows in workers.map(make, chunks) for row in rows]


def _make_rows(arguments: tuple[Any, ...], indices: range) -> list[dict[str, object]]:
    return make_rows(indices, *arguments)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sft-rows", type=int, default=32000)
    parser.add_argument("--rl-rows", type=int, default=9600)
    parser.add_argument("--eval-rows", type=int, default=400)
    parser.add_argument("--reading-share", type=float, default=0.8, help="share of demonstrations that only read")
    args = parser.parse_args(argv)

    train, held_out = load_scans()
    layout = Layout()
    sources = {
        "sft": (train, args.sft_rows, args.reading_share),
        "rl": (train, args.rl_rows, 0.0),
        "eval": (held_out, args.eval_rows, 0.0),
    }
    args.out.mkdir(parents=True, exist_ok=True)
    for part, (name, (scans, count, reading_share)) in enumerate(sources.items()):
        if count:
            rows = draw_in_parallel(count, *scans, 1000 * args.seed + part, layout, reading_share)
            pq.write_table(pa.Table.from_pylist(rows), args.out / f"{name}.parquet")
            print(f"{args.out / name}.parquet: {len(rows)} rows")


if __name__ == "__main__":
    main()
