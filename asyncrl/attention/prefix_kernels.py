"""Attention over a shared prefix by flash-attention calls that are merged by their log-sum-exp.

One part is causal attention within each span: a prompt, or a completion. The other has all completions of a group
as queries and its prompt's keys, without a mask. A softmax over both sets of keys is the mean of the two outputs,
weighted by exp of their log-sum-exps (Rabe and Staats 2021, arXiv 2112.05682); the backward pass of each part takes the
merged output and log-sum-exp, as in ring attention (Liu et al. 2023, arXiv 2310.01889). A group with one completion is
one span. A sink is one more key of each head, with a score of its own and the value 0: it is merged last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.nn import functional as F

Group = tuple[int, Sequence[int]]
"""Prompt length, completion lengths."""
Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
WASTE = 1.3
"""Sequences are attended to together if padding them to one length costs at most this factor of the shorter one's."""
SLACK = 8
"""Tokens added to a length where lengths are compared: many calls cost more than short padding."""
LONG = 256
"""Tokens from which a CPU's call takes a span as it lies in memory: to copy it beside others costs more."""
FLASH_ALIGNMENT = 8
"""Head sizes that CUDA's flash attention takes are multiples of it."""


def spans(groups: Sequence[Group]) -> tuple[list[tuple[int, int]], list[tuple[int, int, int, int]]]:
    """Causal spans (start, length) of a packed sequence, in its order; and for groups with several completions where
    the prompt is and where what sees it: (start, length, start, length)."""
    own: list[tuple[int, int]] = []
    behind: list[tuple[int, int, int, int]] = []
    start = 0
    for prompt, completions in groups:
        inputs = [length for length in completions if length]
        if len(inputs) < 2:
            own.append((start, prompt + sum(inputs)))
        else:
            ends = np.cumsum([start + prompt, *inputs]).tolist()
            own += [(start, prompt), *zip(ends[:-1], inputs, strict=True)]
            behind.append((start, prompt, start + prompt, sum(inputs)))
        start += prompt + sum(inputs)
    return own, behind


def similar(lengths: Sequence[int]) -> list[list[int]]:
    """Batch sequences of similar length, by their indices, shortest first."""
    order = np.argsort(lengths, kind="stable")
    sizes = np.asarray(lengths)[order] + SLACK
    parts: list[list[int]] = []
    begin = 0
    while begin < len(order):
        end = int(np.searchsorted(sizes, WASTE * sizes[begin], side="right"))
        parts.append(order[begin:end].tolist())
        begin = end
    return parts


class Saved(NamedTuple):
    """Tensors that the backward pass takes from the forward one: [T, H, D], the log-sum-exp [H, T]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor


class Kernel(Protocol):
    """Flash attention of both parts. Tensors are packed: [T, H, D], log-sum-exps [H, T]."""

    def prepare(self, groups: Sequence[Group], device: torch.device) -> None: ...

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Merged output and log-sum-exp."""
        ...

    def backward(self, grad: torch.Tensor, saved: Saved, scale: float) -> Three:
        """Gradients of q, k and v."""
        ...


class SharedAttention:
    """The shared form: a kernel, prepared for the groups of one packed sequence."""

    def __init__(self, groups: Sequence[Group], kernel: Kernel, device: torch.device):
        self.kernel = kernel
        kernel.prepare(groups, device)

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[1, H, T, D] each, sinks [H] -> [T, H, D]."""
        packed = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
        width, wide = value.shape[-1], max(query.shape[-1], value.shape[-1])
        wide = -(-wide // FLASH_ALIGNMENT) * FLASH_ALIGNMENT
        packed = [
            F.pad(tensor, (0, wide - tensor.shape[-1])) if tensor.shape[-1] < wide else tensor for tensor in packed
        ]
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        out: torch.Tensor = _Attend.apply(self.kernel, scale, sinks, *packed)  # type: ignore[assignment]
        return out[..., :width]


class _Attend(torch.autograd.Function):
    """Both parts as one operation: what is kept for the backward pass is q, k, v, the output and its log-sum-exp."""

    @staticmethod
    def forward(ctx: Any, kernel: Kernel, scale: float, sinks: torch.Tensor | None, *qkv: torch.Tensor) -> torch.Tensor:
        q, k, v = qkv
        out, lse = kernel.forward(q, k, v, scale)
        if sinks is not None:
            _merge(out, lse, out.new_zeros(1), sinks[:, None].to(lse.dtype))
        ctx.kernel, ctx.scale = kernel, scale
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        *tensors, sinks = ctx.saved_tensors
        (grad,), saved = grad_outputs, Saved(*tensors)
        of_sinks = None
        if ctx.needs_input_grad[2]:
            slope = (grad * saved.out).sum(-1, dtype=saved.lse.dtype).T  # of all probabilities together: [H, T]
            of_sinks = -(slope * (sinks[:, None] - saved.lse).exp()).sum(1).to(sinks.dtype)
        return None, None, of_sinks, *ctx.kernel.backward(grad, saved, ctx.scale)


def _merge(out: torch.Tensor, lse: torch.Tensor, more: torch.Tensor, more_lse: torch.Tensor) -> None:
    """Add the part over other keys, in place. out [T, H, D], lse [H, T]; `more` and `more_lse` of shapes that expand.

    Of 16 bits the mean is taken in fp32 and rounded once: with a rounded weight the error was twice that of one call.
    """
    weight = torch.sigmoid(more_lse - lse).transpose(0, 1)[..., None]
    if out.dtype == more.dtype == weight.dtype:
        out.lerp_(more, weight)
    else:
        out.copy_(torch.lerp(out.to(weight.dtype), more.to(weight.dtype), weight))
    torch.logaddexp(lse, more_lse, out=lse)


# --- on a CPU ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Batch:
    """Spans that are attended to in one call: one as it lies in memory, or several, padded at their end."""

    shape: tuple[int, int]
    span: slice | None
    """Slice of a single span."""
    gather: torch.Tensor
    """[S * L] the packed place of each padded token; padding points at its span's first."""
    real: torch.Tensor
    """[R] which of these are no padding."""
    tokens: torch.Tensor
    """[R] their packed places."""
    padding: torch.Tensor
    """[S * L - R] the others."""


class CpuFlash:
    """Torch's flash attention for CPUs, which returns the log-sum-exp.

    It computes in fp32: in bfloat16 the backward pass of short rows takes three times as long (torch 2.13)."""

    _forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    _backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

    def prepare(self, groups: Sequence[Group], device: torch.device) -> None:
        own, behind = spans(groups)
        long = [(start, length) for start, length in own if length >= LONG]
        short = [(start, length) for start, length in own if 0 < length < LONG]
        self._own = [_batch([one]) for one in long]
        self._own += [_batch([short[i] for i in members]) for members in similar([length for _, length in short])]
        self._behind = [(slice(a, a + n), slice(b, b + m)) for a, n, b, m in behind if n]

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if q.dtype.itemsize < 4:
            out, lse = self.forward(q.float(), k.float(), v.float(), scale)
            return out.to(q.dtype), lse
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        lse = q.new_empty((q.shape[1], q.shape[0]), dtype=torch.promote_types(q.dtype, torch.float32))
        for batch in self._own:
            if batch.span is not None:
                attended, found = self._forward(*(_heads(t[batch.span]) for t in (q, k, v)), 0.0, True, scale=scale)
                out[batch.span], lse[:, batch.span] = attended[0].transpose(0, 1), found[0]
                continue
            attended, found = self._forward(*(_padded(t, batch) for t in (q, k, v)), 0.0, True, scale=scale)
            flat = attended.transpose(1, 2).flatten(0, 1)
            found = found.transpose(0, 1).flatten(1)
            out.index_copy_(0, batch.tokens, flat.index_select(0, batch.real) if len(batch.padding) else flat)
            lse.index_copy_(1, batch.tokens, found.index_select(1, batch.real) if len(batch.padding) else found)
        for keys, queries in self._behind:
            attended, found = self._forward(
                *(_heads(t) for t in (q[queries], k[keys], v[keys])), 0.0, False, scale=scale
            )
            _merge(out[queries], lse[:, queries], attended[0].transpose(0, 1), found[0])
        return out, lse

    def backward(self, grad: torch.Tensor, saved: Saved, scale: float) -> Three:
        q, k, v, out, lse = saved
        if q.dtype.itemsize < 4:
            wide = self.backward(grad.float(), Saved(*(t.float() for t in saved)), scale)
            return tuple(t.to(q.dtype) for t in wide)  # type: ignore[return-value]
        grads = tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))
        for batch in self._own:
            if batch.span is not None:
                inputs = (_heads(t[batch.span]) for t in (grad, q, k, v, out))
                found = self._backward(*inputs, lse[None, :, batch.span], 0.0, True, scale=scale)
                for mine, part in zip(grads, found, strict=True):
                    mine[batch.span] = part[0].transpose(0, 1)
                continue
            # Rows of padding get the probability 0: exp(score - inf).
            sums = lse.index_select(1, batch.gather).index_fill_(1, batch.padding, torch.inf)
            sums = sums.unflatten(1, batch.shape).transpose(0, 1)
            found = self._backward(*(_padded(t, batch) for t in (grad, q, k, v, out)), sums, 0.0, True, scale=scale)
            for mine, part in zip(grads, found, strict=True):
                flat = part.transpose(1, 2).flatten(0, 1)
                mine.index_copy_(0, batch.tokens, flat.index_select(0, batch.real) if len(batch.padding) else flat)
        for keys, queries in self._behind:
            inputs = (_heads(t) for t in (grad[queries], q[queries], k[keys], v[keys], out[queries]))
            found = self._backward(*inputs, lse[None, :, queries], 0.0, False, scale=scale)
            for mine, part, place in zip(grads, found, (queries, keys, keys), strict=True):
                mine[place] += part[0].transpose(0, 1)
        return grads  # type: ignore[return-value]


def _batch(own: Sequence[tuple[int, int]]) -> _Batch:
    longest = max(length for _, length in own)
    gather = np.concatenate([np.append(s + np.arange(n), np.full(longest - n, s)) for s, n in own])
    is_real = np.concatenate([np.arange(longest) < n for _, n in own])
    span = slice(own[0][0], sum(own[0])) if len(own) == 1 else None
    indices = (gather, np.flatnonzero(is_real), gather[is_real], np.flatnonzero(~is_real))
    return _Batch((len(own), longest), span, *(torch.from_numpy(each) for each in indices))


def _heads(tensor: torch.Tensor) -> torch.Tensor:
    """[L, H, D] -> [1, H, L, D]"""
    return tensor.transpose(0, 1)[None]


def _padded(tensor: torch.Tensor, batch: _Batch) -> torch.Tensor:
    """[T, H, D] -> [S, H, L, D]"""
    return tensor.index_select(0, batch.gather).unflatten(0, batch.shape).transpose(1, 2)


# --- on a GPU ---------------------------------------------------------------------------------------


class VarlenFlash:
    """Variable-length flash attention of torch (`torch.nn.attention.varlen`), two calls for a packed sequence.

    Compared with exact attention on an H100 (tests/gpu); on a CPU the calls are tested with plain arithmetic.
    """

    def prepare(self, groups: Sequence[Group], device: torch.device) -> None:
        import torch.nn.attention.varlen  # registers torch_attn's operations

        own, behind = spans(groups)
        lengths = [length for _, length in own if length]
        self._own = _bounds(lengths, lengths, device)
        self._behind = _bounds([m for *_, m in behind], [n for _, n, *_ in behind], device) if behind else None
        self._queries, self._keys = (
            torch.from_numpy(np.concatenate([np.arange(a, a + n) for a, n in spans] or [np.empty(0, np.int64)])).to(
                device
            )
            for spans in ([(b, m) for *_, b, m in behind], [(a, n) for a, n, *_ in behind])
        )

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = self._call(q, k, v, self._own, scale, causal=True)
        if self._behind is not None:
            queries = q.index_select(0, self._queries)
            keys, values = k.index_select(0, self._keys), v.index_select(0, self._keys)
            more, more_lse = self._call(queries, keys, values, self._behind, scale, causal=False)
            mine, mine_lse = out.index_select(0, self._queries), lse.index_select(1, self._queries)
            _merge(mine, mine_lse, more, more_lse)
            out.index_copy_(0, self._queries, mine)
            lse.index_copy_(1, self._queries, mine_lse)
        return out, lse

    def backward(self, grad: torch.Tensor, saved: Saved, scale: float) -> Three:
        q, k, v, out, lse = saved
        grad = grad.contiguous()
        dq, dk, dv = self._back((grad, q, k, v, out, lse), self._own, scale, causal=True)
        if self._behind is not None:
            grad, q, out = (tensor.index_select(0, self._queries) for tensor in (grad, q, out))
            k, v = k.index_select(0, self._keys), v.index_select(0, self._keys)
            sums = lse.index_select(1, self._queries)
            more = self._back((grad, q, k, v, out, sums), self._behind, scale, causal=False)
            for mine, part, places in zip((dq, dk, dv), more, (self._queries, self._keys, self._keys), strict=True):
                mine.index_copy_(0, places, mine.index_select(0, places) + part)  # no place is there twice
        return dq, dk, dv

    @staticmethod
    def _call(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: tuple[Any, ...], scale: float, *, causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        window = [-1, 0] if causal else [-1, -1]
        gqa = q.shape[1] != k.shape[1]
        out, lse, _ = torch.ops.torch_attn._varlen_attn(q, k, v, *bounds, causal, scale, window, gqa)
        return out, lse

    @staticmethod
    def _back(tensors: tuple[torch.Tensor, ...], bounds: tuple[Any, ...], scale: float, *, causal: bool) -> Three:
        window = [-1, 0] if causal else [-1, -1]
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=tensors[0].device)
        return torch.ops.torch_attn._varlen_attn_backward(*tensors, *bounds, causal, no_dropout, scale, window)


def _bounds(
    queries: Sequence[int], keys: Sequence[int], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """Bounds of sequences, and the largest lengths."""
    ends = (torch.from_numpy(np.cumsum([0, *lengths]).astype(np.int32)).to(device) for lengths in (queries, keys))
    return (*ends, max(queries), max(keys))  # type: ignore[return-value]
