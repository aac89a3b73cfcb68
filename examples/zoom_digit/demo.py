"""An agent learns where to look: data, a supervised warm start, asynchronous GRPO over two turns, and scores.

    python examples/zoom_digit/demo.py [--seed 1] [--folder runs/zoom-1] [--controls] [--quick]

The warm start reads a digit that it is shown, and looks near the digit's cell, not at it. GRPO (a rollout server and
a learner, as in any run) knows only whether the answer was right, and has to find out where to look, a turn earlier.
Held-out scenes show scans that training never sees; they are scored with nothing but transformers (score.py).
`--controls` trains twice more from the same warm start: the tool shows another scene; only the last turn is trained.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL import Image

    from asyncrl.algorithms.trajectories import Credit, Trajectories
    from asyncrl.config.algorithm import AlgorithmConfig

HERE = Path(__file__).parent
MODEL = (
    *("--hidden", "64", "--layers", "2", "--intermediate", "192", "--vision-dim", "64", "--vision-depth", "2"),
    *("--normalisation", "0.1", "0.2", "--words", "Which digit is in the picture? crop 0 1 2 3 answer 0 crop tool"),
)
SFT_SCENES = 50_000_000
"""Scenes from this number on are in no reinforcement learning."""
CONTROLS = {
    "wrong image": ["environment.config.wrong_image=true"],
    "last turn only": [f"algorithm.adv_estimator={HERE}/demo.py:last_turn"],
}


def last_turn(t: Trajectories, config: AlgorithmConfig) -> Credit:
    """GRPO whose advantage is 0 in all turns of a trajectory but its last (a control)."""
    import torch

    from asyncrl.algorithms.advantages import normalised
    from asyncrl.algorithms.trajectories import Credit

    assert t.turn is not None, "this control needs an environment"
    last = torch.zeros(len(t.scores), dtype=t.turn.dtype).scatter_reduce(0, t.row, t.turn, "amax")
    advantages = normalised(t.scores, t.group, config)[t.row]
    return Credit(torch.where(t.turn == last[t.row], advantages, 0.0))


def warm_start_row(number: int, reads: bool) -> dict[str, Any]:
    """A demonstration: reading the right cell, or looking near it."""
    from environment import Scene, ZoomDigit, near

    settings, row = ZoomDigit.Config(), ZoomDigit.make_row(number, "train")
    scene = Scene(number, "train", settings.distractors)
    messages = [{"role": "user", "content": row["prompt"] + "<image>"}]
    images = [_png(scene.overview())]
    row_and_column = scene.cell if reads else near(scene, random.Random(number))
    look = "crop {} {}".format(*row_and_column)
    if reads:
        messages += [{"role": "assistant", "content": look}, {"role": "tool", "content": "<image>"}]
        images.append(_png(scene.crop(*scene.cell, settings.crop_side)))
    target = f"answer {scene.digit}" if reads else look
    return {"prompt": messages, "images": images, "target": target, "answer": "", "scene": number, "split": "train"}


def make_data(folder: Path, seed: int, demonstrations: int, scenes: int, held_out: int) -> None:
    """Write sft.parquet, rl.parquet and eval.parquet."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from environment import ZoomDigit

    first = seed * 1_000_000
    rows = {
        "sft": [warm_start_row(SFT_SCENES + first + n, n % 2 == 0) for n in range(demonstrations)],
        "rl": [{"answer": "", **ZoomDigit.make_row(first + n, "train")} for n in range(scenes)],
        "eval": [{"answer": "", **ZoomDigit.make_row(first + n, "held_out")} for n in range(held_out)],
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in rows.items():
        pq.write_table(pa.Table.from_pylist(part), folder / f"{name}.parquet")


def _png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, format="PNG")
    return file.getvalue()


def _run(title: str, *command: str) -> None:
    print(f"\n== {title}", flush=True)
    code = subprocess.call([sys.executable, "-m", *command])
    if code:
        sys.exit(code)


def demo(folder: Path, seed: int, *, controls: bool, quick: bool) -> dict[str, Any]:
    """All stages. Scores of each model by its name; also in FOLDER/summary.json."""
    from score import score

    began, held_out = time.monotonic(), 40 if quick else 400
    first = seed * 1_000_000
    found: dict[str, Any] = {}
    print("== scenes", flush=True)
    make_data(folder / "data", seed, 128 if quick else 12000, 256 if quick else 12800, held_out)
    _run("a small Qwen2-VL", "asyncrl.demo.model", "--out", f"{folder}/model", "--seed", str(seed), *MODEL)
    sft = [f"run_dir={folder}/sft", f"model.path={folder}/model", f"data.train_files=[{folder}/data/sft.parquet]"]
    sft += ["sft.steps=3"] if quick else []
    _run("warm start (asyncrl sft)", "asyncrl", "sft", str(HERE / "sft.yaml"), f"trainer.seed={seed}", *sft)
    warm = folder / "sft" / "export"
    found["warm start"] = score(warm, held_out, first, {})
    found["warm start, wrong image"] = score(warm, held_out, first, {"wrong_image": True})
    shared = [f"model.path={warm}", f"data.train_files=[{folder}/data/rl.parquet]", f"trainer.seed={seed}"]
    shared += [f"data.val_files=[{folder}/data/eval.parquet]"]
    shared += ["trainer.max_steps=2", "batch.prompts_per_step=4"] if quick else []
    for name, changes in {"grpo": [], **(CONTROLS if controls else {})}.items():
        run = folder / name.replace(" ", "-")
        _run(
            f"asynchronous GRPO: {name}",
            "asyncrl",
            "train",
            str(HERE / "grpo.yaml"),
            f"run_dir={run}",
            *shared,
            *changes,
        )
        found[name] = score(run / "export", held_out, first, {"wrong_image": name == "wrong image"})
        if name == "grpo":
            for control, config in (("wrong image", {"wrong_image": True}), ("no tool", {"tool": False})):
                found[f"grpo, scored with {control}"] = score(run / "export", held_out, first, config)
    seconds = time.monotonic() - began
    (folder / "summary.json").write_text(json.dumps({"seed": seed, "seconds": seconds, "scores": found}, indent=2))
    print(f"\n{held_out} held-out scenes, greedy: share of right answers, of looks at the right cell (chance 0.0625)")
    for name, one in found.items():
        print(f"  {name:<32}{one['success']:.3f}   {one['cell']:.3f}")
    print(f"{seconds:.0f} s; everything is in {folder}")
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--controls", action="store_true", help="train the controls, too")
    parser.add_argument("--quick", action="store_true", help="small and fast, and learns nothing: do all parts work?")
    arguments = parser.parse_args(argv)
    from asyncrl.demo.choice import next_folder

    demo(arguments.folder or next_folder("zoom"), arguments.seed, controls=arguments.controls, quick=arguments.quick)


if __name__ == "__main__":
    main()
