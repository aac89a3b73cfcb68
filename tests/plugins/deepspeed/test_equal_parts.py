"""Parts of equal length, as DeepSpeed divides tensors."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")
WHOLE = torch.arange(15.0).view(5, 3)


@pytest.mark.parametrize("ranks", [1, 2, 4, 7])
def test_equal_ranges_have_padding_behind_the_last_element(ranks: int) -> None:
    """With more ranks than are needed the last have nothing but padding."""
    from asyncrl_plugins.deepspeed.updates import even_part

    size = -(-WHOLE.numel() // ranks)
    parts = [even_part(torch.full((size + 1,), -1.0), rank, WHOLE.shape) for rank in range(ranks)]
    for part in parts:
        part.fill(WHOLE)
    assert torch.cat([part.elements for part in parts]).tolist() == WHOLE.view(-1).tolist()
