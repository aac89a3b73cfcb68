"""Parts of a model that a run has trained, and agreement of its two services."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from asyncrl.models.parts import part_of
from tests.system.test_end_to_end import lines


def changed(before: Path, after: Path) -> set[str]:
    """Parts whose weights differ between two model folders."""
    mine, theirs = (load_file(folder / "model.safetensors") for folder in (before, after))
    assert mine.keys() == theirs.keys()
    return {part_of(name.split(".")) for name, tensor in mine.items() if not torch.equal(tensor, theirs[name])}


def largest_difference(run: Path) -> float:
    """Largest difference, in nats, of a token's log-prob to engine and learner in any step."""
    return max(step["logprob_diff_max"] for step in lines(run / "metrics.jsonl"))
