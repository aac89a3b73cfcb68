"""One call of attention for all images or windows of one length gives what a call for each gives."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForImageTextToText

from asyncrl.attention import vision_attention
from asyncrl.attention.vision_attention import attend_by_length
from tests.rigs.tiny_families import PATCH, Family, make_family

ONE_SIZE = [[1, 8, 8]] * 3
SEVERAL = [[1, 8, 8], [1, 4, 12], [2, 6, 4], [1, 8, 8], [1, 2, 2], [1, 8, 8]]
"""Frames, height and width in patches; the third is a video."""


def features_and_gradients(folder: Path, sizes: Sequence[Sequence[int]], *, by_length: bool) -> list[torch.Tensor]:
    model = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="sdpa", dtype=torch.float32)
    if by_length:
        attend_by_length(model)
    grid = torch.tensor(sizes)
    torch.manual_seed(0)
    pixels = torch.randn(int(grid.prod(1).sum()), 6 * PATCH**2)
    tower = model.model.visual
    features = tower(pixels, grid_thw=grid).pooler_output
    features.square().mean().backward()
    return [features, *(parameter.grad for parameter in tower.parameters() if parameter.grad is not None)]


@pytest.mark.parametrize("sizes", [ONE_SIZE, SEVERAL], ids=["one size", "several"])
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_it_is_transformers_attention_in_fewer_calls(
    family: Family, sizes: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_family(family, tmp_path / "model")
    calls: list[int] = []
    for most in (vision_attention.MOST_SEQUENCES, 2):  # as many in a call as there are, and two
        monkeypatch.setattr(vision_attention, "MOST_SEQUENCES", most)
        found: list[list[torch.Tensor]] = []
        for by_length in (False, True):
            with mock.patch.object(F, "scaled_dot_product_attention", wraps=F.scaled_dot_product_attention) as call:
                found.append(features_and_gradients(folder, sizes, by_length=by_length))
            calls.append(call.call_count)
        for usual, ours in zip(*found, strict=True):
            torch.testing.assert_close(ours, usual, rtol=1e-5, atol=1e-6)
    usual, ours, again, in_twos = calls
    assert again == usual
    assert ours < in_twos < usual
