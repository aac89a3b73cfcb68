"""Look, then read: an overview shows where a digit is, and only a closer look shows which.

    asyncrl env try examples/zoom_digit/environment.py:ZoomDigit --unit 14
    asyncrl env baseline examples/zoom_digit/environment.py:ZoomDigit --policy random
    python examples/zoom_digit/environment.py           # what a classifier reads from the overview alone

A scene of 224 x 224 pixels has one handwritten digit (scikit-learn's scans) in one of 4 x 4 cells, and dim blobs. The
policy first sees it from far, then `crop ROW COLUMN` shows one cell, and `answer DIGIT` ends the episode.
Scans of `split: held_out` are in no scene of `train`.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from functools import cache, lru_cache
from typing import Any, ClassVar

import numpy as np
from PIL import Image
from pydantic import Field

from asyncrl.demo.data import Layout, draw_digit, load_scans
from asyncrl.environments.interface import EpisodeOver, Start, ToolError, observe
from asyncrl.environments.observation import Observation
from asyncrl.rewards.sample import RewardSample
from asyncrl_plugins.tools.environment import ToolEnvironment, tool
from asyncrl_plugins.tools.prompt import ToolSettings

CELLS, CELL = 4, 56
SIDE = CELLS * CELL
LAYOUT = Layout(height=SIDE, width=SIDE, max_rotation=8.0, max_shear=0.1)
SPLITS = ("train", "held_out")


@cache
def scans(split: str) -> tuple[np.ndarray, np.ndarray]:
    """Scans of 8 x 8 and their labels."""
    return load_scans()[SPLITS.index(split)]


class Scene:
    """A picture that follows from its number; `cell` overrides where the digit is."""

    def __init__(self, number: int, split: str, distractors: int, cell: tuple[int, int] | None = None) -> None:
        rng = np.random.default_rng([number, SPLITS.index(split)])
        images, labels = scans(split)
        chosen = int(rng.integers(len(images)))
        places = rng.permutation(CELLS * CELLS)
        drawn = divmod(int(places[0]), CELLS)
        self.digit = int(labels[chosen])
        self.cell = cell or (drawn[0], drawn[1])
        texture = Image.fromarray(rng.integers(0, 50, (16, 16), dtype=np.uint8))
        canvas = np.asarray(texture.resize((SIDE, SIDE), Image.Resampling.BICUBIC), dtype=np.float32)
        jitter = rng.uniform(-4, 4, 2)
        middle = (CELL * (self.cell[1] + 0.5) + jitter[0], CELL * (self.cell[0] + 0.5) + jitter[1])
        canvas = np.maximum(canvas, draw_digit(images[chosen], 45.0, middle, LAYOUT, rng))
        ys, xs = np.ogrid[0:CELL, 0:CELL]
        for place in places[1 : 1 + distractors]:
            row, column = divmod(int(place), CELLS)
            if (row, column) == self.cell:
                continue
            (x, y), (width, height) = CELL / 2 + rng.uniform(-12, 12, 2), rng.uniform(4, 9, 2)
            blob = np.exp(-(((xs - x) / width) ** 2) - ((ys - y) / height) ** 2)
            there = canvas[row * CELL : (row + 1) * CELL, column * CELL : (column + 1) * CELL]
            np.maximum(there, rng.uniform(60, 120) * blob, out=there)
        self.pixels = Image.fromarray(canvas.clip(0, 255).astype(np.uint8)).convert("RGB")

    def overview(self) -> Image.Image:
        """4 x 4 cells of one colour each: what is in them is seen, and not read.

        A cell's row is the share of red in what is bright there, and its column that of green: a small model has no
        other way to tell image tokens apart by their places, since Qwen2-VL's positions are relative. A cell with a
        digit is as bright as can be, whichever digit it is.
        """
        far = np.asarray(self.pixels.convert("L").resize((CELLS, CELLS), Image.Resampling.BOX), dtype=np.float32)
        bright = ((far - 25) * 11).clip(0, 255)
        share = np.arange(CELLS) / (CELLS - 1)
        colours = np.stack([bright * share[:, None], bright * share, bright], axis=-1).astype(np.uint8)
        return Image.fromarray(colours).resize((CELL, CELL), Image.Resampling.NEAREST)

    def crop(self, row: int, column: int, side: int) -> Image.Image:
        """One cell at `side` x `side` pixels."""
        left, top = column * CELL, row * CELL
        return self.pixels.crop((left, top, left + CELL, top + CELL)).resize((side, side), Image.Resampling.BOX)


@lru_cache(64)
def drawn_scene(number: int, split: str, distractors: int) -> Scene:
    """A scene that the trajectories of a ticket share."""
    return Scene(number, split, distractors)


def scene_of(start: Start, distractors: int) -> Scene:
    """The row's scene, or that of the ticket's seed."""
    return drawn_scene(start.row.get("scene", start.seed), start.row.get("split", "train"), distractors)


def oracle(start: Start, rng: random.Random) -> Iterator[str]:
    """Look at the digit's cell, and know the digit."""
    scene = scene_of(start, start.config.distractors)
    yield f"crop {scene.cell[0]} {scene.cell[1]}"
    yield f"answer {scene.digit}"


def guess(start: Start, rng: random.Random) -> Iterator[str]:
    """Look anywhere, answer anything."""
    yield f"crop {rng.randrange(CELLS)} {rng.randrange(CELLS)}"
    yield f"answer {rng.randrange(10)}"


def warm_start(start: Start, rng: random.Random) -> Iterator[str]:
    """Look at the digit's cell or one beside it (right one time in six), and read the digit where it is there."""
    scene = scene_of(start, start.config.distractors)
    row, column = near(scene, rng)
    yield f"crop {row} {column}"
    yield f"answer {scene.digit if (row, column) == scene.cell else rng.randrange(10)}"


def near(scene: Scene, rng: random.Random) -> tuple[int, int]:
    """A cell within one row and one column of the digit's, that one not more often than others."""
    around = [[n for n in (place - 1, place, place + 1) if 0 <= n < CELLS] for place in scene.cell]
    return rng.choice(around[0]), rng.choice(around[1])


def right(sample: RewardSample) -> float:
    """Whether the last turn says the scene's digit: the accuracy of held-out rows, of weight 0 in training."""
    scene = drawn_scene(sample.columns["scene"], sample.columns["split"], 0)
    return float(sample.completion.strip() == f"answer {scene.digit}")


class ZoomDigit(ToolEnvironment):
    """Reward 1 for the right digit; each look but the first costs a little. `info`: right, hit, crops."""

    call_format: ClassVar[str] = "plain"
    show_tools: ClassVar[bool] = False
    policies: ClassVar[dict[str, Any]] = {"oracle": oracle, "random": guess, "warm_start": warm_start}

    class Config(ToolSettings):
        distractors: int = Field(default=2, ge=0, le=15)
        """Blobs in other cells."""
        crop_side: int = Field(default=28, ge=14)
        """Pixels at which a cell is shown."""
        call_cost: float = 0.02
        """Cost of each look after the first."""
        tool: bool = True
        """True: `crop` works. Without it (a control) there is only the overview."""
        wrong_image: bool = False
        """Show a cell of another scene (a control): a digit is there, too, but any."""

    @classmethod
    def make_row(cls, index: int, split: str) -> dict[str, Any]:
        """A row of the data set."""
        return {"prompt": "Which digit is in the picture?", "scene": index, "split": split}

    def reset(self, start: Start) -> Observation:
        self.config: ZoomDigit.Config = start.config
        self.scene = scene_of(start, self.config.distractors)
        self.shown = self.scene
        if self.config.wrong_image:
            number = start.row.get("scene", start.seed) + 1_000_003
            split = start.row.get("split", "train")
            self.shown = Scene(number, split, self.config.distractors, cell=self.scene.cell)
        self.crops = 0
        self.ctx.info |= {"right": False, "hit": False, "crops": 0}
        return observe(self.scene.overview(), role="user")

    @tool
    def crop(self, row: int, column: int) -> Image.Image:
        """Look at one of 4 x 4 cells from near.

        row: 0 is at the top.
        column: 0 is at the left.
        """
        if not (0 <= row < CELLS and 0 <= column < CELLS):
            raise ToolError(f"there is no cell {row} {column}: rows and columns are 0 to {CELLS - 1}")
        if not self.config.tool:
            raise ToolError("crop is not available")
        self.crops += 1
        self.ctx.reward -= self.config.call_cost if self.crops > 1 else 0.0
        self.ctx.info |= {"crops": self.crops, "hit": self.ctx.info["hit"] or (row, column) == self.scene.cell}
        return self.shown.crop(row, column, self.config.crop_side)

    @tool
    def answer(self, digit: int) -> None:
        """Say which digit it is.

        digit: 0 to 9.
        """
        right = digit == self.scene.digit
        self.ctx.info["right"] = right
        raise EpisodeOver(float(right))


def main() -> None:
    """Train classifiers on overviews, for the digit and for its cell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenes", type=int, default=4000)
    parser.add_argument("--distractors", type=int, default=2)
    arguments = parser.parse_args()
    from sklearn.neural_network import MLPClassifier

    def overviews(split: str, count: int) -> tuple[np.ndarray, list[int], list[int]]:
        scenes = [Scene(number, split, arguments.distractors) for number in range(count)]
        pixels = np.stack([np.asarray(scene.overview()).ravel() / 255.0 for scene in scenes])
        return pixels, [scene.digit for scene in scenes], [scene.cell[0] * CELLS + scene.cell[1] for scene in scenes]

    train, held_out = overviews("train", arguments.scenes), overviews("held_out", 1000)
    for name, place in (("digit", 1), ("cell", 2)):
        classifier = MLPClassifier((128,), random_state=0, early_stopping=True).fit(train[0], train[place])
        right = float(np.mean(classifier.predict(held_out[0]) == held_out[place]))
        print(f"{name} from the overview alone: {right:.3f} of 1000 held-out scenes")


if __name__ == "__main__":
    main()
