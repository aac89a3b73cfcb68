"""A frozen lake in pictures: go to the goal, around the holes, one step a turn.

    asyncrl env try examples/grid_lake/environment.py:GridLake --unit 14
    asyncrl env baseline examples/grid_lake/environment.py:GridLake --policy random
    python examples/grid_lake/environment.py            # the random policy's success, exactly

Maps of 4 x 4 cells follow from their number. Every fifth, by a hash of the map itself, is held out: no map is in both
parts.
"""

from __future__ import annotations

import argparse
import hashlib
import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from PIL import Image, ImageDraw
from pydantic import Field

from asyncrl.environments.interface import EpisodeOver, Start, observe
from asyncrl.environments.observation import Observation, key_of
from asyncrl_plugins.tools.environment import ToolEnvironment, tool
from asyncrl_plugins.tools.prompt import ToolSettings

SIZE, CELL, TURNS = 4, 14, 8
STEPS = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
ICE, HOLE, GOAL, PLAYER = (225, 240, 250), (20, 40, 110), (240, 190, 40), (210, 30, 40)
Cell = tuple[int, int]


@dataclass(frozen=True)
class Lake:
    """The player's first cell, the goal, and the holes."""

    start: Cell
    goal: Cell
    holes: frozenset[Cell]

    @property
    def digest(self) -> bytes:
        return hashlib.blake2b(repr((self.start, self.goal, sorted(self.holes))).encode(), digest_size=8).digest()

    def moved(self, cell: Cell, direction: str) -> Cell:
        """The cell after a step; a step off the lake stays where it is."""
        row, column = cell[0] + STEPS[direction][0], cell[1] + STEPS[direction][1]
        return (row, column) if 0 <= row < SIZE and 0 <= column < SIZE else cell

    def path(self) -> list[str] | None:
        """A shortest way to the goal, or None."""
        ways: dict[Cell, list[str]] = {self.start: []}
        todo = deque([self.start])
        while todo:
            cell = todo.popleft()
            for direction in STEPS:
                after = self.moved(cell, direction)
                if after not in ways and after not in self.holes:
                    ways[after] = [*ways[cell], direction]
                    todo.append(after)
        return ways.get(self.goal)

    def random_success(self, turns: int = TURNS) -> float:
        """Probability that steps in uniformly random directions reach the goal in as many turns: a Markov chain."""
        at, arrived = {self.start: 1.0}, 0.0
        for _ in range(turns):
            after: dict[Cell, float] = {}
            for cell, probability in at.items():
                for direction in STEPS:
                    place = self.moved(cell, direction)
                    if place == self.goal:
                        arrived += probability / 4
                    elif place not in self.holes:
                        after[place] = after.get(place, 0.0) + probability / 4
            at = after
        return arrived

    def picture(self, player: Cell) -> Image.Image:
        """56 x 56 pixels."""
        image = Image.new("RGB", (SIZE * CELL, SIZE * CELL), ICE)
        draw = ImageDraw.Draw(image)
        for row in range(SIZE):
            for column in range(SIZE):
                left, top = column * CELL, row * CELL
                draw.rectangle((left, top, left + CELL - 1, top + CELL - 1), outline=(190, 210, 225))
                if (row, column) in self.holes:
                    draw.ellipse((left + 1, top + 1, left + CELL - 2, top + CELL - 2), fill=HOLE)
                if (row, column) == self.goal:
                    draw.rectangle((left + 2, top + 2, left + CELL - 3, top + CELL - 3), fill=GOAL)
        left, top = player[1] * CELL, player[0] * CELL
        draw.polygon(((left + 7, top + 2), (left + 2, top + 11), (left + 11, top + 11)), fill=PLAYER)
        return image


def make_lake(number: int, split: str) -> Lake:
    """The map of this number: solvable in 2 to 6 steps, of its part of all maps."""
    rng = random.Random(f"lake {number}")
    cells = [(row, column) for row in range(SIZE) for column in range(SIZE)]
    while True:
        start, goal, *others = rng.sample(cells, len(cells))
        lake = Lake(start, goal, frozenset(others[: rng.randint(2, 6)]))
        path = lake.path()
        if path is not None and 2 <= len(path) <= 6 and (lake.digest[0] % 5 == 0) == (split == "held_out"):
            return lake


def lake_of(start: Start) -> Lake:
    """The row's map, or that of the ticket's seed."""
    return make_lake(start.row.get("lake", start.seed), start.row.get("split", "train"))


def oracle(start: Start, rng: random.Random) -> Iterator[str]:
    """A shortest way."""
    yield from lake_of(start).path() or []


def wander(start: Start, rng: random.Random) -> Iterator[str]:
    """Random steps."""
    while True:
        yield rng.choice(list(STEPS))


def warm_start(start: Start, rng: random.Random) -> Iterator[str]:
    """Half of the steps random, the others on a shortest way from where the player is."""
    lake = lake_of(start)
    at = lake.start
    while True:
        way = Lake(at, lake.goal, lake.holes).path() or list(STEPS)
        step = rng.choice(list(STEPS)) if rng.random() < 0.5 else way[0]
        at = lake.moved(at, step)
        yield step


class GridLake(ToolEnvironment):
    """Reward 1 at the goal, 0 in a hole or after too many turns. `info`: arrived, steps, shortest."""

    call_format: ClassVar[str] = "plain"
    show_tools: ClassVar[bool] = False
    policies: ClassVar[dict[str, Any]] = {"oracle": oracle, "random": wander, "warm_start": warm_start}

    class Config(ToolSettings):
        discount: float = Field(default=1.0, gt=0, le=1)
        """Factor of the reward for each step more than the shortest way has."""
        slip: float = Field(default=0.0, ge=0, le=1)
        """Probability that a step goes in a random direction."""
        blind: bool = False
        """Show the empty lake only (a control)."""

    @classmethod
    def make_row(cls, index: int, split: str) -> dict[str, Any]:
        """A row of the data set."""
        return {"prompt": "Go to the yellow goal: up, down, left or right.", "lake": index, "split": split}

    def reset(self, start: Start) -> Observation:
        self.config: GridLake.Config = start.config
        self.lake = lake_of(start)
        self.at, self.steps = self.lake.start, 0
        self.ctx.info |= {"arrived": False, "steps": 0, "shortest": len(self.lake.path() or [])}
        return observe(self._picture(), role="user")

    @tool
    def up(self) -> Image.Image:
        """Go one cell up."""
        return self._go("up")

    @tool
    def down(self) -> Image.Image:
        """Go one cell down."""
        return self._go("down")

    @tool
    def left(self) -> Image.Image:
        """Go one cell to the left."""
        return self._go("left")

    @tool
    def right(self) -> Image.Image:
        """Go one cell to the right."""
        return self._go("right")

    def state_key(self, observation: Observation) -> bytes:
        place = self.at[0] * SIZE + self.at[1]
        return key_of(observation) if self.config.blind else self.lake.digest + bytes([place])

    def _go(self, direction: str) -> Image.Image:
        if self.config.slip and self.ctx.rng.random() < self.config.slip:
            direction = self.ctx.rng.choice(list(STEPS))
        self.at, self.steps = self.lake.moved(self.at, direction), self.steps + 1
        self.ctx.info["steps"] = self.steps
        if self.at in self.lake.holes:
            raise EpisodeOver(0.0)
        if self.at == self.lake.goal:
            self.ctx.info["arrived"] = True
            raise EpisodeOver(self.config.discount ** max(0, self.steps - self.ctx.info["shortest"]))
        return self._picture()

    def _picture(self) -> Image.Image:
        return Lake((0, 0), (0, 0), frozenset()).picture((0, 0)) if self.config.blind else self.lake.picture(self.at)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--maps", type=int, default=2000)
    parser.add_argument("--split", choices=("train", "held_out"), default="held_out")
    parser.add_argument("--turns", type=int, default=TURNS)
    arguments = parser.parse_args()
    lakes = [make_lake(number, arguments.split) for number in range(arguments.maps)]
    success = sum(lake.random_success(arguments.turns) for lake in lakes) / len(lakes)
    steps = sum(len(lake.path() or []) for lake in lakes) / len(lakes)
    print(f"{len({lake.digest for lake in lakes})} maps of {arguments.split}, {steps:.2f} steps on average")
    print(f"random steps reach the goal in {arguments.turns} turns with probability {success:.4f}")


if __name__ == "__main__":
    main()
