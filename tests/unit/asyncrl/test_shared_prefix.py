"""Attention of packed groups: who sees whom, the gradient of gathering, and one bias for all layers."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from asyncrl.models import shared_prefix
from asyncrl.models.shared_prefix import ALIGNMENT, make_layout, shared_prefix_attention

pytestmark = pytest.mark.usefixtures("one_thread")
GROUPS: Sequence[tuple[int, Sequence[int]]] = [(5, (3, 0, 4)), (2, (2,)), (6, (4, 5)), (5, ()), (3, (9, 2))]
"""12, 4, 15, 5 and 14 tokens: two batches with padding, and a completion of one token, which is no input."""
APART: Sequence[tuple[int, Sequence[int]]] = [
    (2, (9, 8, 1, 9, 30, 9)),
    (3, (0, 7, 30, 12, 13)),
    (9, (11, 10, 2, 24, 25, 9, 8)),
    (2, (0,)),
]
"""Completions of several lengths, one without an input among them."""
CPU = torch.device("cpu")


def visible(groups: Sequence[tuple[int, Sequence[int]]]) -> torch.Tensor:
    """[T, T] bool by the definition, token by token: True where the row's sees the column's."""
    tokens = [
        (group, part)
        for group, (prompt, completions) in enumerate(groups)
        for part, length in enumerate((prompt, *completions))
        for _ in range(length)
    ]
    rows = [[g == h and (q == 0 or q == p) for h, q in tokens] for g, p in tokens]
    return torch.tensor(rows).tril()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bias_hides_what_a_token_does_not_see_and_is_taken_without_a_copy(dtype: torch.dtype) -> None:
    layout = make_layout(GROUPS, CPU, dtype)
    assert len(layout.batches) == 2
    wanted = visible(GROUPS)
    for batch in layout.batches:
        for gather, bias in zip(batch.gather, batch.bias[:, 0], strict=True):
            length = int((gather.diff() > 0).sum()) + 1  # padding points at the first token
            seen = wanted[gather[:length]][:, gather[:length]]
            assert torch.equal(bias[:length, :length] == 0, seen)
            assert torch.equal(bias.isneginf(), bias != 0)
            assert bool((bias == 0).any(-1).all()), "the softmax of padding is defined"
            assert bool(bias[:length, length:].isneginf().all()), "padding is seen by padding alone"
        assert batch.bias.dtype == dtype
        assert batch.bias.stride(-1) == 1
        assert all(stride % ALIGNMENT == 0 for stride in batch.bias.stride()[:-1])
    everything = torch.cat([batch.gather.flatten() for batch in layout.batches])
    assert torch.equal(everything[layout.places], torch.arange(len(wanted)))


@pytest.mark.parametrize(
    ("groups", "gain", "batches"),
    [(GROUPS, 3, 2), (GROUPS[:1], 3, 1), (APART, 0, 9)],
    ids=["several batches", "one batch", "completions apart"],
)
def test_packed_attention_and_its_gradients_are_those_of_one_whole_score_matrix(
    monkeypatch: pytest.MonkeyPatch, groups: Sequence[tuple[int, Sequence[int]]], gain: int, batches: int
) -> None:
    monkeypatch.setattr(shared_prefix, "SPLIT_GAIN", gain)
    layout, mask = make_layout(groups, CPU, torch.float32), visible(groups)
    assert len(layout.batches) == batches
    torch.manual_seed(0)
    query, key, value = inputs = [torch.randn(1, heads, len(mask), 8, requires_grad=True) for heads in (4, 2, 2)]
    packed, _ = shared_prefix_attention(nn.Module(), query, key, value, None, shared_prefix=layout)
    whole = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(packed, whole)
    direction = torch.randn_like(whole)
    for ours, theirs in zip(
        torch.autograd.grad(packed, inputs, direction), torch.autograd.grad(whole, inputs, direction), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_completions_apart_have_few_scores_and_aligned_biases() -> None:
    groups = [(31, (63,) * 8)] * 4
    layout = make_layout(groups, CPU, torch.float32)
    assert [tuple(batch.bias.shape) for batch in layout.batches] == [(4, 1, 31, 31), (32, 1, 63, 94)]
    for batch in layout.batches:
        assert all(stride % ALIGNMENT == 0 for stride in batch.bias.stride()[:-1])
    everything = torch.cat([batch.gather.flatten() for batch in layout.batches])
    assert torch.equal(everything[layout.places], torch.arange(4 * (31 + 8 * 63)))


@pytest.mark.parametrize("group", [(31, (4,) * 8), (11, (11,) * 8), (2000, (100,) * 8), (40, (90,)), (90, ())])
def test_groups_of_short_few_or_no_completions_stay_whole(group: tuple[int, Sequence[int]]) -> None:
    assert len(make_layout([group], CPU, torch.float32).batches) == 1
