"""Attention of packed groups: who sees whom, by definition, in each form, with its gradients, and its cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from asyncrl.attention.masked_attention import MaskedAttention
from asyncrl.attention.prefix_kernels import CpuFlash, Group, SharedAttention, VarlenFlash, spans
from asyncrl.attention.shared_prefix import (
    SeparateAttention,
    SharedPrefixLayout,
    UnpackableError,
    make_layout,
    separate_cost,
    shared_cost,
    shared_prefix_attention,
)

pytestmark = pytest.mark.usefixtures("one_thread")
GROUPS: Sequence[Group] = [(5, (3, 0, 4)), (2, (2,)), (6, (4, 5)), (5, ()), (3, (9, 2))]
"""A completion of one token, which is no input, groups of one completion and of none."""
LONG: Sequence[Group] = [
    (300, (9, 8, 270, 9, 30, 9)),
    (3, (0, 7, 30, 12, 13)),
    (2, (0,)),
]
"""Spans that are attended to as they lie in memory, and padded ones."""
CPU = torch.device("cpu")
SINKS = torch.tensor([-3.0, 0.0, 1.5, 6.0])
"""Of four heads: one that takes next to nothing, and one that takes most."""


def visible(groups: Sequence[Group]) -> torch.Tensor:
    """[T, T] bool by the definition, token by token: True where the row's sees the column's."""
    tokens = [
        (group, part)
        for group, (prompt, completions) in enumerate(groups)
        for part, length in enumerate((prompt, *completions))
        for _ in range(length)
    ]
    rows = [[g == h and (q == 0 or q == p) for h, q in tokens] for g, p in tokens]
    return torch.tensor(rows).tril()


def whole_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor | None, mask: torch.Tensor
) -> torch.Tensor:
    """[1, T, H, D] by a whole score matrix; sinks are its last column, which is dropped behind the softmax."""
    if sinks is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True).transpose(1, 2)
    keys, values = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))
    scores = (query @ keys.mT * query.shape[-1] ** -0.5).masked_fill(~mask, -torch.inf)
    scores = torch.cat([scores, sinks[:, None, None].expand(1, -1, len(mask), 1)], -1)
    return (scores.softmax(-1)[..., :-1] @ values).transpose(1, 2)


@pytest.fixture
def plain_varlen() -> Iterator[None]:
    """Plain arithmetic on the CPU in the place of CUDA's variable-length kernels, with their shapes."""
    library = torch.library.Library("aten", "IMPL")

    def scores(
        q: torch.Tensor, k: torch.Tensor, ends_q: torch.Tensor, ends_k: torch.Tensor, scale: float, causal: bool
    ) -> torch.Tensor:
        rows = torch.bucketize(torch.arange(len(q)), ends_q[1:], right=True)
        columns = torch.bucketize(torch.arange(len(k)), ends_k[1:], right=True)
        seen = rows[:, None] == columns[None]
        if causal:
            assert torch.equal(ends_q, ends_k)
            seen = seen.tril()
        keys = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        return (torch.einsum("qhd,khd->hqk", q, keys) * scale).masked_fill(~seen, -torch.inf)

    def forward(q: Any, k: Any, v: Any, ends_q: Any, ends_k: Any, *rest: Any, **named: Any) -> Any:
        found = scores(q, k, ends_q, ends_k, named["scale"], rest[3])
        values = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
        out = torch.einsum("hqk,khd->qhd", found.softmax(-1), values)
        nothing = torch.empty(0)
        return out, found.logsumexp(-1), nothing, nothing, nothing

    def backward(
        grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, ends_q: Any, ends_k: Any, *rest: Any, **named: Any
    ) -> Any:
        repeats = q.shape[1] // k.shape[1]
        probability = (scores(q, k, ends_q, ends_k, named["scale"], rest[3]) - lse[..., None]).exp()
        slope = torch.einsum("qhd,khd->hqk", grad, v.repeat_interleave(repeats, 1))
        slope = probability * (slope - (grad * out).sum(-1).T[..., None]) * named["scale"]
        dq = torch.einsum("hqk,khd->qhd", slope, k.repeat_interleave(repeats, 1))
        dk, dv = torch.einsum("hqk,qhd->khd", slope, q), torch.einsum("hqk,qhd->khd", probability, grad)
        return dq, *(each.unflatten(1, (-1, repeats)).sum(2) for each in (dk, dv))

    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", backward, "CPU")
    yield
    library._destroy()


FORMS: dict[str, Callable[[Sequence[Group]], Any]] = {
    "separate": lambda groups: SeparateAttention(groups, CPU),
    "shared": lambda groups: SharedAttention(groups, CpuFlash(), CPU),
    "varlen": lambda groups: SharedAttention(groups, VarlenFlash(), CPU),
}


@pytest.mark.usefixtures("plain_varlen")
@pytest.mark.parametrize(("width", "key_heads", "sinks"), [(8, 2, None), (10, 4, None), (10, 2, SINKS)])
@pytest.mark.parametrize("groups", [GROUPS, GROUPS[:1], LONG], ids=["several groups", "one group", "long"])
@pytest.mark.parametrize("form", FORMS)
def test_packed_attention_and_its_gradients_are_those_of_one_whole_score_matrix(
    form: str, groups: Sequence[Group], width: int, key_heads: int, sinks: torch.Tensor | None
) -> None:
    mask = visible(groups)
    layout = SharedPrefixLayout(len(mask), len(mask), FORMS[form](groups))
    torch.manual_seed(0)
    heads = (4, key_heads, key_heads)
    qkv = [(2 * torch.randn(1, h, len(mask), width)).requires_grad_() for h in heads]
    sinks = sinks if sinks is None else sinks.clone().requires_grad_()
    inputs = [*qkv, *([] if sinks is None else [sinks])]
    packed, _ = shared_prefix_attention(nn.Module(), *qkv, None, shared_prefix=layout, s_aux=sinks)
    whole = whole_attention(*qkv, sinks, mask)
    torch.testing.assert_close(packed, whole)
    direction = torch.randn_like(whole)
    for ours, theirs in zip(
        torch.autograd.grad(packed, inputs, direction), torch.autograd.grad(whole, inputs, direction), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=5e-5)


def test_in_bfloat16_it_is_as_near_to_exact_attention_as_torchs_own() -> None:
    groups: Sequence[Group] = [(40, (30, 25, 61)), (7, (9, 9))]
    mask, errors = visible(groups), []
    torch.manual_seed(0)
    exact = [torch.randn(1, 2, len(mask), 16).bfloat16().double().requires_grad_() for _ in range(3)]
    wanted = F.scaled_dot_product_attention(*exact, attn_mask=mask).transpose(1, 2)
    direction = torch.randn_like(wanted).bfloat16()
    wanted_gradients = torch.autograd.grad(wanted, exact, direction.double())
    layout = SharedPrefixLayout(len(mask), len(mask), SharedAttention(groups, CpuFlash(), CPU))
    for ours in (True, False):
        query, key, value = inputs = [tensor.detach().bfloat16().requires_grad_() for tensor in exact]
        if ours:
            found, _ = shared_prefix_attention(nn.Module(), query, key, value, None, shared_prefix=layout)
        else:
            found = F.scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2)
        gradients = torch.autograd.grad(found, inputs, direction)
        pairs = zip((found, *gradients), (wanted, *wanted_gradients), strict=True)
        errors.append([float((a - b).detach().norm() / b.detach().norm()) for a, b in pairs])
    assert all(a < 2 * b for a, b in zip(*errors, strict=True)), errors


class Largest(TorchDispatchMode):
    """The most elements of any result of an operation."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple) else (result,):
            self.elements = max(self.elements, getattr(tensor, "numel", lambda: 0)())
        return result


@pytest.mark.parametrize("form", ["separate", "shared"])
def test_memory_is_linear_in_the_tokens(form: str) -> None:
    groups: Sequence[Group] = [(64, (300,) * 4)]
    query, key, value = inputs = [torch.randn(1, 2, 64 + 4 * 300, 8, requires_grad=True) for _ in range(3)]
    with Largest() as largest:
        layout = SharedPrefixLayout(64 + 4 * 300, 364, FORMS[form](groups))
        attended, _ = shared_prefix_attention(nn.Module(), query, key, value, None, shared_prefix=layout)
        torch.autograd.grad(attended.sum(), inputs)
    assert largest.elements <= 4 * (64 + 300) * 2 * 8


def test_scores_are_those_that_are_seen_and_no_more_than_separate_sequences_have() -> None:
    groups: Sequence[Group] = [(50, (20,) * 8), (11, (30,))]
    own, behind = spans(groups)
    counted = sum(n * (n + 1) // 2 for _, n in own) + sum(queries * keys for _, keys, _, queries in behind)
    assert counted == int(visible(groups).sum())
    assert sum(n for _, n in own) == 50 + 8 * 20 + 11 + 30


@pytest.mark.parametrize(
    ("groups", "form"),
    [
        ([(500, (2000,) * 8)], SharedAttention),
        ([(2000, (100,) * 8)] * 2, SharedAttention),
        ([(60, (11,) * 8)] * 20, SharedAttention),
        ([(8, (8,) * 4)] * 10, SeparateAttention),
        ([(8, (300,) * 8)], SeparateAttention),
    ],
)
def test_the_form_that_costs_less_is_taken(groups: Sequence[Group], form: type) -> None:
    assert isinstance(make_layout(groups, CPU, torch.float32).form, form)
    assert (shared_cost(groups) <= separate_cost(groups)) == (form is SharedAttention)


def test_a_gpu_shares_where_flash_attention_takes_the_dtype() -> None:
    meta = torch.device("meta")
    assert isinstance(make_layout(GROUPS, meta, torch.bfloat16).form, SharedAttention)
    assert isinstance(make_layout(GROUPS, meta, torch.float32).form, SeparateAttention)


@pytest.mark.parametrize("sinks", [None, SINKS], ids=["", "sinks"])
@pytest.mark.parametrize("window", [None, 2, 5, 100])
def test_windows_and_images_that_see_themselves_are_masked_by_definition(
    window: int | None, sinks: torch.Tensor | None
) -> None:
    """A window counts positions, in which each completion follows the prompt, and cuts images, too."""
    groups, spans = GROUPS[:3], [[(0, 2)], [], [(1, 3), (4, 6)]]
    mask, start = visible(groups), 0
    for (prompt, completions), parts in zip(groups, spans, strict=True):
        for first, end in parts:
            mask[start + first : start + end, start + first : start + end] = True
        start += prompt + sum(completions)
    if window:
        places = [i for p, cs in groups for i in (*range(p), *(p + j for c in cs for j in range(c)))]
        mask &= torch.tensor(places)[:, None] - torch.tensor(places)[None] < window
    layout = make_layout(groups, CPU, torch.float32, window=window, spans=spans)
    torch.manual_seed(0)
    inputs = [torch.randn(1, heads, len(mask), 8) for heads in (4, 2, 2)]
    given: dict[str, Any] = {"sliding_window": window, "shared_prefix": layout, "s_aux": sinks}
    packed, _ = shared_prefix_attention(nn.Module(), *inputs, None, **given)
    torch.testing.assert_close(packed, whole_attention(*inputs, sinks, mask))


NOT_IN_A_LAYOUT: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 30.0},
    "position_bias": {"position_bias": torch.zeros(1)},
    "indices": {"indices": torch.zeros(1)},
    "attention_mask": {"attention_mask": torch.ones(1, 1, 8, 8)},
    "is_causal=False": {"is_causal": False},
    "sliding_window=5": {"sliding_window": 5},
}


@pytest.mark.parametrize("part", NOT_IN_A_LAYOUT)
def test_what_the_layout_does_not_say_is_refused(part: str) -> None:
    layout = make_layout([(3, (2, 3))], CPU, torch.float32)
    inputs = [torch.randn(1, heads, 8, 8) for heads in (4, 2, 2)]
    given = {"attention_mask": None, "shared_prefix": layout, **NOT_IN_A_LAYOUT[part]}
    with pytest.raises(UnpackableError, match=f"the attention of Module takes {part}$"):
        shared_prefix_attention(nn.Module(), *inputs, **given)
    with pytest.raises(UnpackableError, match="Module does not hand on the layout"):
        shared_prefix_attention(nn.Module(), *inputs, None)


@pytest.mark.parametrize("window", [6, 7, 100_000])
def test_a_window_as_long_as_the_longest_row_cuts_nothing(window: int) -> None:
    groups: Sequence[Group] = [(3, (2, 3)), (4, (1,))]
    layout = make_layout(groups, CPU, torch.float32, window=window)
    assert not isinstance(layout.form, MaskedAttention)
    inputs = [torch.randn(1, heads, 13, 8) for heads in (4, 2, 2)]
    cut, _ = shared_prefix_attention(nn.Module(), *inputs, None, sliding_window=window, shared_prefix=layout)
    whole, _ = shared_prefix_attention(nn.Module(), *inputs, None, shared_prefix=layout)
    assert torch.equal(cut, whole)
