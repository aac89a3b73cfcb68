"""Read, let a tool compute, answer: a picture shows two numbers and an operator.

    asyncrl env try examples/calc/environment.py:Calc --unit 14
    asyncrl env baseline examples/calc/environment.py:Calc --policy random

`calc "37*46"` returns text, and `answer 1702` ends the episode: the policy copies from what it has read.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from typing import Any, ClassVar

import numpy as np
from PIL import Image, ImageDraw

from asyncrl.demo.data import Layout, draw_digit, load_scans
from asyncrl.environments.interface import EpisodeOver, Start, ToolError, observe
from asyncrl.environments.observation import Observation
from asyncrl_plugins.tools.calculator import calculator
from asyncrl_plugins.tools.environment import ToolEnvironment, tool
from asyncrl_plugins.tools.prompt import ToolSettings

SLOT, SLOTS = 28, 5
LAYOUT = Layout(height=SLOT, width=SLOT * SLOTS, max_rotation=8.0, max_shear=0.1)
SPLITS = ("train", "held_out")
LINES = {"+": ((4, 14, 24, 14), (14, 4, 14, 24)), "-": ((4, 14, 24, 14),), "*": ((6, 6, 22, 22), (6, 22, 22, 6))}


@cache
def scans(split: str) -> tuple[np.ndarray, np.ndarray]:
    """Scans of 8 x 8 and their labels."""
    return load_scans()[SPLITS.index(split)]


class Problem:
    """Two numbers of two digits and an operator, which follow from the row's number."""

    def __init__(self, number: int, split: str) -> None:
        self._seed, self._split = [number, SPLITS.index(split)], split
        rng = np.random.default_rng(self._seed)
        left, right = (int(each) for each in rng.integers(10, 100, 2))
        operator = str(rng.choice(list(LINES)))
        self.text = f"{left}{operator}{right}"
        self.value = int(calculator(self.text))

    def picture(self) -> Image.Image:
        """140 x 28 pixels."""
        images, labels = scans(self._split)
        rng = np.random.default_rng([*self._seed, 1])
        canvas = np.zeros((LAYOUT.height, LAYOUT.width), dtype=np.float32)
        for place, letter in enumerate(self.text):
            if letter.isdigit():
                chosen = rng.choice(np.flatnonzero(labels == int(letter)))
                middle = ((place + 0.5) * SLOT, SLOT / 2)
                canvas = np.maximum(canvas, draw_digit(images[chosen], 24.0, middle, LAYOUT, rng))
        picture = Image.fromarray(canvas.clip(0, 255).astype(np.uint8)).convert("RGB")
        draw = ImageDraw.Draw(picture)
        for x0, y0, x1, y1 in LINES[self.text[2]]:
            draw.line((2 * SLOT + x0, y0, 2 * SLOT + x1, y1), fill=(255, 255, 255), width=3)
        return picture


def problem_of(start: Start) -> Problem:
    """The row's problem, or that of the ticket's seed."""
    return Problem(start.row.get("problem", start.seed), start.row.get("split", "train"))


def oracle(start: Start, rng: random.Random) -> Iterator[str]:
    """Read right, call, copy."""
    problem = problem_of(start)
    yield f'calc "{problem.text}"'
    yield f"answer {problem.value}"


def guess(start: Start, rng: random.Random) -> Iterator[str]:
    """Any problem, and its result."""
    text = f"{rng.randrange(10, 100)}{rng.choice(list(LINES))}{rng.randrange(10, 100)}"
    yield f'calc "{text}"'
    yield f"answer {calculator(text)}"


class Calc(ToolEnvironment):
    """Reward 1 for the right value. `info`: right, called."""

    call_format: ClassVar[str] = "plain"
    show_tools: ClassVar[bool] = False
    policies: ClassVar[dict[str, Any]] = {"oracle": oracle, "random": guess}

    class Config(ToolSettings):
        tool: bool = True
        """Whether `calc` works (off: a control)."""

    @classmethod
    def make_row(cls, index: int, split: str) -> dict[str, Any]:
        """A row of the data set."""
        return {"prompt": "What is the result?", "problem": index, "split": split}

    def reset(self, start: Start) -> Observation:
        self.config: Calc.Config = start.config
        self.problem = problem_of(start)
        self.ctx.info |= {"right": False, "called": False}
        return observe(self.problem.picture(), role="user")

    @tool
    def calc(self, expression: str) -> int | float:
        """Compute an arithmetic expression.

        expression: such as 37*46.
        """
        if not self.config.tool:
            raise ToolError("calc is not available")
        self.ctx.info["called"] = True
        return calculator(expression)

    @tool
    def answer(self, value: int) -> None:
        """Say the result.

        value: a whole number.
        """
        self.ctx.info["right"] = value == self.problem.value
        raise EpisodeOver(float(value == self.problem.value))
