"""Data of gymnasium's FrozenLake in pictures: maps of 3 x 3 cells, and single moves for a warm start.

    python examples/frozen_lake/prepare.py --out data/frozen_lake

Start, present and holes lie anywhere on a map that can be solved. Of the warm start's moves half are those of a
shortest way, half are random: it teaches the words, and to look a little. Every fifth map, by its number among all that
there are, is held out.
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
WORDS = ("left", "down", "right", "up")
"""FrozenLake's actions 0 to 3."""
MOVES = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
PROMPT = "Go to the present."


def maps(holes: int = 2) -> list[tuple[str, ...]]:
    """All maps whose present can be reached, in an order of their own."""
    found = []
    cells = range(SIZE * SIZE)
    for start, goal in itertools.permutations(cells, 2):
        for dark in itertools.combinations([cell for cell in cells if cell not in (start, goal)], holes):
            signs = ["S" if c == start else "G" if c == goal else "H" if c in dark else "F" for c in cells]
            desc = tuple("".join(signs[row * SIZE : (row + 1) * SIZE]) for row in range(SIZE))
            if shortest(desc):
                found.append(desc)
    random.Random(0).shuffle(found)
    return found


def shortest(desc: tuple[str, ...]) -> list[str]:
    """Words of a shortest way to the present; empty where there is none."""
    at = divmod("".join(desc).index("S"), SIZE)
    ways: dict[tuple[int, int], list[str]] = {at: []}
    todo = deque([at])
    while todo:
        cell = todo.popleft()
        if desc[cell[0]][cell[1]] == "G":
            return ways[cell]
        for word, (down, right) in MOVES.items():
            row, column = cell[0] + down, cell[1] + right
            if 0 <= row < SIZE and 0 <= column < SIZE and (row, column) not in ways and desc[row][column] != "H":
                ways[row, column] = [*ways[cell], word]
                todo.append((row, column))
    return []


def picture(desc: tuple[str, ...]) -> Image.Image:
    lake = gymnasium.make("FrozenLake-v1", render_mode="rgb_array", desc=list(desc), is_slippery=False)
    lake.reset(seed=0)
    drawn = Image.fromarray(lake.render())  # type: ignore[arg-type]
    lake.close()
    return drawn.resize((SIZE * SIDE, SIZE * SIDE), Image.Resampling.LANCZOS)


def write(file: Path, rows: list[dict[str, object]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{file}: {len(rows)} rows")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--moves", type=int, default=3000, help="rows of the warm start")
    arguments = parser.parse_args()
    folder, draw = arguments.out, random.Random(arguments.seed)
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    every = maps()
    parts = {"rl": [desc for number, desc in enumerate(every) if number % 5], "eval": every[::5]}
    for name, chosen in parts.items():
        write(folder / f"{name}.jsonl", [{"prompt": PROMPT, "answer": "", "desc": desc} for desc in chosen])
    moves: list[dict[str, object]] = []
    for number, desc in enumerate(draw.choices(parts["rl"], k=arguments.moves)):
        file = folder / "pictures" / f"{number}.png"
        picture(desc).save(file)
        word = shortest(desc)[0] if draw.random() < 0.5 else draw.choice(WORDS)
        moves.append({"prompt": f"{PROMPT}<image>", "images": [str(file.absolute())], "answer": "", "target": word})
    write(folder / "sft.jsonl", moves)


if __name__ == "__main__":
    main()
