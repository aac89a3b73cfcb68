"""The smallest vision-language model and data that behave like real ones."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
DIGITS = ROOT / "examples" / "digits"


def run_script(path: Path, *arguments: str) -> None:
    """Run a script of the project in this process: torch is imported once."""
    argv = sys.argv
    sys.argv = [str(path), *arguments]
    try:
        runpy.run_path(str(path), run_name="__main__")
    finally:
        sys.argv = argv


def make_tiny_model(folder: Path, *, intermediate: int = 128) -> Path:
    """A Qwen2-VL folder of 0.2 M parameters (of 1.0 M with an `intermediate` of 2048), with tokenizer and processor."""
    size = ["--hidden", "64", "--intermediate", str(intermediate), "--layers", "2"]
    size += ["--vision-dim", "32", "--vision-depth", "1"]
    run_script(DIGITS / "make_model.py", "--out", str(folder), "--vision-heads", "2", *size)
    return folder


def make_digits(folder: Path, *, rl_rows: int = 64) -> Path:
    """Folder with sft.parquet, rl.parquet and eval.parquet."""
    rows = ["--sft-rows", "64", "--rl-rows", str(rl_rows), "--eval-rows", "16"]
    run_script(DIGITS / "make_data.py", "--out", str(folder), *rows)
    return folder
