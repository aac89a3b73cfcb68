"""Time, scores and memory of packed attention: shared prefix, separate sequences, and one mask for a group, on a CPU.

    python -m benchmarks.packed_attention [--layers 2] [--heads 2] [--width 32] [--dtype float32] [--rounds 3]

Attention alone, forward and backward, on one thread. `shared` and `separate` are the forms that training chooses from
for each micro-batch; `mask` has the scores between completions computed and hidden, as packed training did before, for
cases of few tokens. The forms take turns within each round. Prints a Markdown table: scores per head, medians of CPU
time, their ratio to the better one of the two forms, and what is alive between forward and backward beside queries,
keys and values.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import median

import torch
from torch import nn
from torch.nn import functional as F

from asyncrl.attention.prefix_kernels import CpuFlash, Group, SharedAttention, spans
from asyncrl.attention.shared_prefix import SeparateAttention, SharedPrefixLayout, make_layout, shared_prefix_attention
from asyncrl.memory_plan.live_bytes import LiveBytes

CPU = torch.device("cpu")
CASES: dict[str, list[Group]] = {
    "8 x 2,000 behind 500": [(500, (2000,) * 8)],
    "8 x 100 behind 2,000, 2 groups": [(2000, (100,) * 8)] * 2,
    "8 x 59 behind 63, 15 groups": [(63, (59,) * 8)] * 15,
    "8 x 11 behind 50, 20 groups": [(50, (11,) * 8)] * 20,
    "8 x 200 behind 20, 2 groups": [(20, (200,) * 8)] * 2,
    "8 x 300 behind 8": [(8, (300,) * 8)],
    "4 x 8 behind 8, 10 groups": [(8, (8,) * 4)] * 10,
}
MASKED = 4000
"""Most tokens that the form with a mask is computed for."""

Groups = Sequence[Group]
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Attend = Callable[[Inputs], torch.Tensor]


def _by(form: SharedAttention | SeparateAttention) -> Attend:
    layout = SharedPrefixLayout(0, 0, form)
    return lambda inputs: shared_prefix_attention(nn.Module(), *inputs, None, shared_prefix=layout)[0]


def prepare_mask(groups: Groups, dtype: torch.dtype) -> Attend:
    """One bias per group, in a call for each."""
    biases: list[tuple[slice, torch.Tensor]] = []
    start = 0
    for prompt, completions in groups:
        length = prompt + sum(completions)
        span = torch.repeat_interleave(torch.arange(len(completions) + 1), torch.tensor([prompt, *completions]))
        seen = ((span[None] == 0) | (span[None] == span[:, None])).tril_()
        biases.append(
            (slice(start, start + length), torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, -torch.inf))
        )
        start += length

    def attend(inputs: Inputs) -> torch.Tensor:
        parts = [
            F.scaled_dot_product_attention(*(tensor[:, :, place] for tensor in inputs), attn_mask=bias)
            for place, bias in biases
        ]
        return torch.cat(parts, dim=2).transpose(1, 2)

    return attend


FORMS: dict[str, Callable[[Groups, torch.dtype], Attend]] = {
    "separate": lambda groups, dtype: _by(SeparateAttention(groups, CPU)),
    "shared": lambda groups, dtype: _by(SharedAttention(groups, CpuFlash(), CPU)),
    "mask": prepare_mask,
}


def scores(form: str, groups: Groups) -> int:
    """Scores of one head that count in the form; with a mask, those that are hidden, too."""
    if form == "mask":
        return sum((prompt + sum(completions)) ** 2 for prompt, completions in groups)
    if form == "separate":
        return sum((prompt + length) * (prompt + length + 1) // 2 for prompt, all_ in groups for length in all_)
    own, behind = spans(groups)
    return sum(n * (n + 1) // 2 for _, n in own) + sum(queries * keys for _, keys, _, queries in behind)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    dtype: torch.dtype = getattr(torch, arguments.dtype)
    print(f"| completions ({arguments.dtype}) | form | scores, M | a layer, ms | of the better form | MiB alive |")
    print("|---|---|---|---|---|---|")
    for name, groups in CASES.items():
        tokens = sum(prompt + sum(completions) for prompt, completions in groups)
        # [1, H, T, D] as models make them: heads beside each other in memory
        shape = (1, tokens, arguments.heads, arguments.width)
        inputs: list[Inputs] = [
            tuple(torch.randn(shape, dtype=dtype).transpose(1, 2).requires_grad_() for _ in range(3))  # type: ignore[misc]
            for _ in range(arguments.layers)
        ]
        forms = {form: prepare for form, prepare in FORMS.items() if form != "mask" or tokens <= MASKED}
        seconds: dict[str, list[float]] = defaultdict(list)
        gradients: dict[str, tuple[torch.Tensor, ...]] = {}
        for _ in range(arguments.rounds):
            for form, prepare in forms.items():
                attend = prepare(groups, dtype)
                started = time.process_time()
                gradients[form] = passes(attend, inputs)
                seconds[form].append((time.process_time() - started) / arguments.layers)
        for found in gradients.values():
            for a, b in zip(gradients["separate"], found, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-5)
        taken = "shared" if isinstance(make_layout(groups, CPU, dtype).form, SharedAttention) else "separate"
        best = min(median(seconds[form]) for form in ("separate", "shared"))
        for form, prepare in forms.items():
            milliseconds, alive = 1000 * median(seconds[form]), alive_bytes(prepare, groups, dtype, inputs) / 2**20
            said = f"**{form}** (taken)" if form == taken else form
            count = f"{scores(form, groups) / 1e6:,.2f}"
            ratio = f"{milliseconds / best / 1000:.2f}"
            print(f"| {name} | {said} | {count} | {milliseconds:,.1f} | {ratio} | {alive:,.1f} |", flush=True)


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
