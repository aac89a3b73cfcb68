"""Held-out pictures with what the start said and what the trained policy says, and a check of the exported folder.

    python -m asyncrl_plugins.demos.then_and_now FOLDER [--rows 8]

FOLDER is a demo's. Both models are loaded with plain transformers, so that the export is checked without the services.
Writes FOLDER/then_and_now.json and FOLDER/pictures.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asyncrl.launch.command import command
from asyncrl.plugins import implementation, installed_evaluator


def compare(folder: Path, rows: int) -> list[dict[str, Any]]:
    """Question, right answer, and both completions of each of the first held-out rows."""
    from asyncrl.config.load import load_config

    score = implementation(installed_evaluator("the demo").implementation)
    config = load_config(folder / "grpo" / "config.yaml", [f"data.max_val_rows={rows}", "evaluation.group_size=1"])
    then, now = (score(config, each) for each in (Path(config.model.path), folder / "grpo" / "export"))
    return [
        {
            "prompt": old.sample.prompt.replace("<image>", ""),
            "answer": old.sample.answer,
            "images": old.sample.images,
            "then": old.sample.completion,
            "then_right": bool(old.score.reward),
            "now": new.sample.completion,
            "now_right": bool(new.score.reward),
        }
        for old, new in zip(then, now, strict=True)
    ]


@command
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=8)
    arguments = parser.parse_args(argv)
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    found = compare(arguments.folder, arguments.rows)
    (arguments.folder / "pictures").mkdir(exist_ok=True)
    mark = {True: "right", False: "wrong"}
    for number, row in enumerate(found, 1):
        names = [f"pictures/{number}.png" for _ in row["images"]]
        for name, data in zip(names, row["images"], strict=True):
            (arguments.folder / name).write_bytes(data)
        row["images"] = names
        print(f"{names[0] if names else number}  {row['prompt']}  (answer: {row['answer']})")
        print(f"    then  {row['then']!r:<44} {mark[row['then_right']]}")
        print(f"    now   {row['now']!r:<44} {mark[row['now_right']]}")
    (arguments.folder / "then_and_now.json").write_text(json.dumps(found, indent=2), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
