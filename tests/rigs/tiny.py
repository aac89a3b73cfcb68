"""The smallest vision-language model and data that behave like real ones."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
GRPO = ROOT / "asyncrl" / "demo" / "grpo.yaml"


def make_tiny_model(folder: Path, *, intermediate: int = 128) -> Path:
    """A Qwen2-VL folder of 0.2 M parameters (of 1.0 M with an `intermediate` of 2048), with tokenizer and processor."""
    from asyncrl.demo import model  # torch and transformers: not for tests that make no model

    size = ["--hidden", "64", "--intermediate", str(intermediate), "--layers", "2"]
    size += ["--vision-dim", "32", "--vision-depth", "1"]
    model.main(["--out", str(folder), "--vision-heads", "2", *size])
    return folder


def make_digits(folder: Path, *, rl_rows: int = 64) -> Path:
    """Folder with sft.parquet, rl.parquet and eval.parquet."""
    from asyncrl.demo import data

    rows = ["--sft-rows", "64", "--rl-rows", str(rl_rows), "--eval-rows", "16"]
    data.main(["--out", str(folder), *rows])
    return folder
