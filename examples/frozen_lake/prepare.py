"""Data of gymnasium's FrozenLake in pictures: maps of 3 x 3 cells, and moves of a player who does not mind holes.

    python examples/frozen_lake/prepare.py --out data/frozen_lake

Start, flag and two or three holes lie anywhere on a map that can be solved in two moves or more; a fifth of the maps is
held out. The warm start shows moves of a player who goes straight for the flag, through holes: it teaches the words and
to see player and flag. Holes, and ways around them, are left to the reward.

Its rows are in an order to be kept (`data.shuffle: false`): single pictures with the player anywhere, then moves within
conversations, then such moves of which half are random, for the reward to have something to choose from: who has
always gone straight never tries the way around. Random moves from the start on hide from a small model what is to be
seen.

On most maps a way straight for the flag passes the holes, for a player who sees them; the held-out maps without one are
in `around.jsonl` once more.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from collections import deque
from pathlib import Path

import gymnasium
from PIL import Image

SIZE, SIDE = 3, 14
TURNS = 6
ASTRAY = 0.3
"""Share of random moves by which the warm start's player comes to its pictures."""
WORDS = ("left", "down", "right", "up")
"""FrozenLake's actions 0 to 3."""
MOVES = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
PROMPT = "Go to the flag."
Cell = tuple[int, int]
Map = tuple[str, ...]
Rows = list[dict[str, object]]


def maps() -> list[Map]:
    """All maps with two or three holes and a shortest way of two moves or more, in an order of their own."""
    found = []
    cells = range(SIZE * SIZE)
    for (start, goal), count in itertools.product(itertools.permutations(cells, 2), (2, 3)):
        for dark in itertools.combinations([cell for cell in cells if cell not in (start, goal)], count):
            signs = ["S" if c == start else "G" if c == goal else "H" if c in dark else "F" for c in cells]
            desc = tuple("".join(signs[row * SIZE : (row + 1) * SIZE]) for row in range(SIZE))
            if len(shortest(desc)) > 1:
                found.append(desc)
    random.Random(0).shuffle(found)
    return found


def split() -> dict[str, list[Map]]:
    """The maps of training, and those held out: every fifth."""
    every = maps()
    return {"rl": [desc for number, desc in enumerate(every) if number % 5], "eval": every[::5]}


def place(desc: Map, sign: str) -> Cell:
    row, column = divmod("".join(desc).index(sign), SIZE)
    return row, column


def free(desc: Map) -> list[Cell]:
    """Cells where an episode goes on."""
    return [divmod(cell, SIZE) for cell, sign in enumerate("".join(desc)) if sign in "SF"]


def moved(cell: Cell, word: str) -> Cell:
    """The cell after a move; one off the lake stays where it is."""
    row, column = cell[0] + MOVES[word][0], cell[1] + MOVES[word][1]
    return (row, column) if 0 <= row < SIZE and 0 <= column < SIZE else cell


def shortest(desc: Map) -> list[str]:
    """Words of a shortest way to the flag; empty where there is none."""
    at = place(desc, "S")
    ways: dict[Cell, list[str]] = {at: []}
    todo = deque([at])
    while todo:
        cell = todo.popleft()
        if desc[cell[0]][cell[1]] == "G":
            return ways[cell]
        for word in WORDS:
            row, column = moved(cell, word)
            if (row, column) not in ways and desc[row][column] != "H":
                ways[row, column] = [*ways[cell], word]
                todo.append((row, column))
    return []


def far(desc: Map, cell: Cell) -> int:
    """Moves from a cell to the flag, were there no holes."""
    goal = place(desc, "G")
    return abs(cell[0] - goal[0]) + abs(cell[1] - goal[1])


def straight(desc: Map, cell: Cell) -> list[str]:
    """Words that bring the player nearer to the flag, with or without a hole there."""
    return [word for word in WORDS if far(desc, moved(cell, word)) < far(desc, cell)]


def episode(desc: Map, draw: random.Random, astray: float) -> tuple[list[tuple[Cell, str]], bool]:
    """Cells and moves of a player who goes straight but for a share `astray`, and whether the flag was reached."""
    at, told = place(desc, "S"), []
    for _ in range(TURNS):
        word = draw.choice(WORDS) if draw.random() < astray else draw.choice(straight(desc, at))
        told.append((at, word))
        at = moved(at, word)
        if desc[at[0]][at[1]] in "HG":
            return told, desc[at[0]][at[1]] == "G"
    return told, False


class Pictures:
    """Files of maps' pictures, one for each cell that the player can stand on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: dict[tuple[Map, Cell], str] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def file(self, desc: Map, cell: Cell) -> str:
        if (desc, cell) not in self.files:
            for at, picture in drawn(desc).items():
                path = self.folder / f"{''.join(desc)}-{at[0]}{at[1]}.png"
                picture.save(path)
                self.files[desc, at] = str(path.absolute())
        return self.files[desc, cell]


def drawn(desc: Map) -> dict[Cell, Image.Image]:
    """Pictures of a map as the package draws them, by the player's cell: each cell is an image token."""
    lake = gymnasium.make("FrozenLake-v1", render_mode="rgb_array", desc=list(desc), is_slippery=False)
    lake.reset(seed=0)
    found = {}
    for cell in free(desc):
        lake.unwrapped.s = cell[0] * SIZE + cell[1]  # type: ignore[attr-defined]
        pixels = Image.fromarray(lake.render())  # type: ignore[arg-type]
        found[cell] = pixels.resize((SIZE * SIDE, SIZE * SIDE), Image.Resampling.LANCZOS)
    lake.close()
    return found


def demonstration(cells: list[Cell], words: list[str], desc: Map, pictures: Pictures) -> dict[str, object]:
    """The last word as the target, those before it as the conversation so far."""
    messages = [{"role": "user", "content": f"{PROMPT}<image>"}]
    for word in words[:-1]:
        messages += [{"role": "assistant", "content": word}, {"role": "tool", "content": "<image>"}]
    images = [pictures.file(desc, cell) for cell in cells]
    return {"prompt": messages, "images": images, "target": words[-1], "answer": ""}


def demonstrations(maps: list[Map], count: int, loose: float, draw: random.Random, pictures: Pictures) -> Rows:
    """`count` rows in their order: 5 of 8 single pictures, 2 conversations, 1 with random targets (`loose`)."""
    rows: Rows = []
    for number, desc in enumerate(draw.choices(maps, k=count)):
        told, _ = episode(desc, draw, ASTRAY)
        turn = draw.randrange(len(told))
        cells, words = [draw.choice(free(desc))], [""]
        if number >= count * 5 // 8:
            cells, words = [cell for cell, _ in told[: turn + 1]], [word for _, word in told[: turn + 1]]
        random_move = number >= count * 7 // 8 and draw.random() < loose
        words[-1] = draw.choice(WORDS if random_move else straight(desc, cells[-1]))
        rows.append(demonstration(cells, words, desc, pictures))
    return rows


def write(file: Path, rows: Rows) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{file}: {len(rows)} rows")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--moves", type=int, default=25600, help="rows of the warm start")
    parser.add_argument("--loose", type=float, default=0.5, help="share of random targets in the last eighth of them")
    arguments = parser.parse_args()
    folder, draw, parts = arguments.out, random.Random(arguments.seed), split()
    pictures = Pictures(folder / "pictures")
    around = [desc for desc in parts["eval"] if len(shortest(desc)) > far(desc, place(desc, "S"))]
    for name, chosen in {**parts, "around": around}.items():
        write(folder / f"{name}.jsonl", [{"prompt": PROMPT, "answer": "", "desc": desc} for desc in chosen])
    write(folder / "sft.jsonl", demonstrations(parts["rl"], arguments.moves, arguments.loose, draw, pictures))
    for astray in (0.0, ASTRAY, 1.0):
        reached = [episode(desc, draw, astray)[1] for desc in parts["eval"] for _ in range(20)]
        print(f"held-out maps solved with {astray:.0%} of the moves at random: {sum(reached) / len(reached):.3f}")


if __name__ == "__main__":
    main()
