"""Time and memory of packed attention: one bias for all layers, against a bool mask and indexing, on a CPU.

    python -m benchmarks.packed_attention [--layers 4] [--heads 2] [--width 32] [--dtype float32] [--rounds 3]

Attention alone, forward and backward, on one thread. `masks` is the earlier form: a bool mask made in numpy, of which
torch makes a bias in every layer, and gathering by indices, whose gradient is added up at sorted places. `one bias` has
whole groups, `apart` is what training on a CPU takes: completions that are long beside their prompt in calls of their
own. The forms take turns within each round. Prints a Markdown table: medians of CPU time, and what is alive between
forward and backward beside queries, keys and values.
"""

from __future__ import annotations

import argparse
import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import accumulate
from statistics import median
from unittest import mock

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from asyncrl.models import shared_prefix
from asyncrl.models.shared_prefix import SharedPrefixLayout, make_layout, shared_prefix_attention
from asyncrl.tools.memory_plan.live_bytes import LiveBytes

COMPLETIONS = 8
CPU = torch.device("cpu")
CASES: dict[str, tuple[int, ...]] = {
    "512": (512,),
    "2,048": (2048,),
    "2,048 in 4 groups": (512, 480, 544, 512),
    "2,000 in 20 groups": (96, 104, 92, 108) * 5,
    "8,000 in 15 groups": (535,) * 15,
    "8,192": (8192,),
}
"""Tokens of each group in a micro-batch."""

Groups = Sequence[tuple[int, Sequence[int]]]
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Attend = Callable[[Inputs], torch.Tensor]


def split(tokens: int) -> tuple[int, list[int]]:
    """A group: a prompt of one ninth, and completions."""
    return tokens - COMPLETIONS * (tokens // 9), [tokens // 9] * COMPLETIONS


def prepare_whole(groups: Groups, dtype: torch.dtype) -> Attend:
    with mock.patch.object(shared_prefix, "SPLIT_GAIN", math.inf):
        return prepare_apart(groups, dtype)


def prepare_apart(groups: Groups, dtype: torch.dtype) -> Attend:
    layout: SharedPrefixLayout = make_layout(groups, CPU, dtype)
    return lambda inputs: shared_prefix_attention(nn.Module(), *inputs, None, shared_prefix=layout)[0]


def prepare_masks(groups: Groups, dtype: torch.dtype) -> Attend:
    """Groups of similar length only: one batch."""
    lengths = [prompt + sum(completions) for prompt, completions in groups]
    longest = max(lengths)
    gather, mask = np.zeros((len(groups), longest), np.int64), np.zeros((len(groups), longest, longest), bool)
    for row, (start, length, group) in enumerate(zip(accumulate([0, *lengths]), lengths, groups, strict=False)):
        gather[row] = np.where(np.arange(longest) < length, start + np.arange(longest), start)
        segment = np.repeat(np.arange(len(group[1]) + 1), [group[0], *group[1]])
        seen = np.tril((segment[None, :] == 0) | (segment[None, :] == segment[:, None]))
        mask[row, :length, :length] = seen
        mask[row, length:, 0] = True
    real = np.concatenate([row * longest + np.arange(length) for row, length in enumerate(lengths)])
    places, indices, bools = (torch.from_numpy(values) for values in (real, gather, mask[:, None]))

    def attend(inputs: Inputs) -> torch.Tensor:
        padded = (tensor[0].transpose(0, 1)[indices].transpose(1, 2) for tensor in inputs)
        attended = F.scaled_dot_product_attention(*padded, attn_mask=bools)
        return attended.transpose(1, 2).flatten(0, 1)[places][None]

    return attend


FORMS: dict[str, Callable[[Groups, torch.dtype], Attend]] = {
    "masks": prepare_masks,
    "one bias": prepare_whole,
    "apart": prepare_apart,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--most", type=int, default=8192, help="tokens of the largest case")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    dtype: torch.dtype = getattr(torch, arguments.dtype)
    print(f"| tokens ({arguments.dtype}) | form | layout, ms | a layer, ms | of the first | MiB alive |")
    print("|---|---|---|---|---|---|")
    for name, case in CASES.items():
        if sum(case) > arguments.most:
            continue
        groups = [split(tokens) for tokens in case]
        # [1, H, T, D] as models make them: heads beside each other in memory
        shape = (1, sum(case), arguments.heads, arguments.width)
        inputs: list[Inputs] = [
            tuple(torch.randn(shape, dtype=dtype).transpose(1, 2).requires_grad_() for _ in range(3))  # type: ignore[misc]
            for _ in range(arguments.layers)
        ]
        seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
        gradients: dict[str, tuple[torch.Tensor, ...]] = {}
        for _ in range(arguments.rounds):
            for form, prepare in FORMS.items():
                started = time.process_time()
                attend = prepare(groups, dtype)
                prepared = time.process_time()
                gradients[form] = passes(attend, inputs)
                seconds[form, "layout"].append(prepared - started)
                seconds[form, "layer"].append((time.process_time() - prepared) / arguments.layers)
        masks, whole, apart = gradients.values()
        assert all(torch.equal(a, b) for a, b in zip(masks, whole, strict=True)), "the forms differ in their bits"
        for a, b in zip(whole, apart, strict=True):
            torch.testing.assert_close(a, b)
        for form, prepare in FORMS.items():
            layout, layer = (1000 * median(seconds[form, what]) for what in ("layout", "layer"))
            ratio = layer / 1000 / median(seconds["masks", "layer"])
            alive = alive_bytes(prepare, groups, dtype, inputs) / 2**20
            print(f"| {name} | {form} | {layout:,.1f} | {layer:,.1f} | {ratio:.2f} | {alive:,.1f} |", flush=True)


def passes(attend: Attend, inputs: Sequence[Inputs]) -> tuple[torch.Tensor, ...]:
    """Gradients of all layers' inputs."""
    total = sum(attend(layer).float().square().mean() for layer in inputs)
    assert isinstance(total, torch.Tensor)
    return torch.autograd.grad(total, [tensor for layer in inputs for tensor in layer])


def alive_bytes(
    prepare: Callable[[Groups, torch.dtype], Attend], groups: Groups, dtype: torch.dtype, inputs: Sequence[Inputs]
) -> int:
    """Bytes alive after the forward passes of all layers, layout included."""
    with LiveBytes("cpu", known=[tensor for layer in inputs for tensor in layer]) as live:
        attend = prepare(groups, dtype)
        outputs = [attend(layer) for layer in inputs]
        assert outputs
        return live.live


if __name__ == "__main__":
    main()
