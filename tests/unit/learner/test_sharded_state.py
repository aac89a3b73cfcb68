"""Parts of tensors as ranges of the flattened ones, and tensors that are read from several files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from learner.training.sharded_state import TensorPart, stored_tensors

WHOLE = torch.arange(15.0).view(5, 3)
PARTS = {  # first places, by what has divided the tensor
    "rows": [(0, WHOLE[:3]), (3, WHOLE[3:])],
    "equal ranges": [(0, WHOLE.view(-1)[:8]), (8, WHOLE.view(-1)[8:])],
    "ranges of a group's parameters": [(0, WHOLE.view(-1)[:1]), (1, WHOLE.view(-1)[1:14]), (14, WHOLE.view(-1)[14:])],
}


def write(folder: Path, parts: list[tuple[int, torch.Tensor]]) -> None:
    """As PyTorch's distributed checkpoints do, with the places in the headers."""
    for number, (first, part) in enumerate(parts):
        places = {"w": {"saved_offsets": [first] + [0] * (part.dim() - 1)}}
        file = folder / f"shard-{number:05}-model-00001-of-00001.safetensors"
        save_file({"w": part.clone()}, file, metadata={"DCP_SHARDING_INFO": json.dumps(places)})


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_any_range_is_read_from_any_division(tmp_path: Path, parts: list[tuple[int, torch.Tensor]]) -> None:
    write(tmp_path, parts)
    stored = stored_tensors(tmp_path, {"w": WHOLE.to("meta")})["w"]
    assert torch.equal(stored.whole(), WHOLE)
    for first in range(16):
        for last in range(first, 16):
            part = TensorPart(torch.full((last - first,), -1.0), first, WHOLE.shape)
            part.fill(stored)
            assert part.elements.tolist() == list(range(first, last))


def test_elements_that_are_in_no_file_are_said(tmp_path: Path) -> None:
    write(tmp_path, [(0, WHOLE[:3])])
    stored = stored_tensors(tmp_path, {"w": WHOLE.to("meta")})["w"]
    assert stored.range(2, 9).tolist() == list(range(2, 9))
    with pytest.raises(ValueError, match="of w 3 of the elements 6 to 15 are in"):
        stored.range(6, 15)
