"""Time and memory of log-probs and entropies in chunks of tokens, against all tokens at once, on a CPU.

    python -m benchmarks.output_head [--tokens 2048] [--vocabulary 32768] [--hidden 256] [--rounds 3]

One forward and backward pass through the output layer alone, in fp32, on one thread. The forms take turns within each
round. Prints a Markdown table: medians of CPU time, their ratio to the first row, and the most bytes that are alive
beside weights, their gradient and the hidden states.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from statistics import median
from types import SimpleNamespace

import torch

from asyncrl.memory_plan.live_bytes import LiveBytes
from asyncrl.models import output_head
from asyncrl.models.output_head import Entropy, OutputHead

CHUNKS = (2**40, 2**24)
"""Logits per chunk; the first is more than there are."""
ENTROPIES: tuple[Entropy, ...] = ("value", "none")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    linear = torch.nn.Linear(arguments.hidden, arguments.vocabulary, bias=False)
    linear.weight.grad = torch.zeros_like(linear.weight)
    hidden = torch.randn(arguments.tokens, arguments.hidden, requires_grad=True)
    hidden.grad = torch.zeros_like(hidden)
    targets = torch.randint(arguments.vocabulary, (arguments.tokens,))
    model = SimpleNamespace(get_output_embeddings=lambda: linear, config=SimpleNamespace())
    head = OutputHead(model, temperature=1.0, banned=torch.tensor([0]))

    def run(chunk: int, entropy: Entropy) -> None:
        output_head.LOGITS_PER_CHUNK = chunk
        outputs = head(hidden, targets, entropy=entropy)
        outputs.logprobs.sum().backward()

    forms = [(chunk, entropy) for chunk in CHUNKS for entropy in ENTROPIES]
    seconds: dict[tuple[int, Entropy], list[float]] = defaultdict(list)
    for _ in range(arguments.rounds):
        for form in forms:
            started = time.process_time()
            run(*form)
            seconds[form].append(time.process_time() - started)
    print("| tokens at once | entropy | CPU s | of the first row | MiB at most |")
    print("|---|---|---|---|---|")
    for chunk, entropy in forms:
        with LiveBytes("cpu", known=[linear.weight, linear.weight.grad, hidden, hidden.grad]) as live:
            run(chunk, entropy)
        taken = median(seconds[chunk, entropy])
        tokens = min(arguments.tokens, chunk // arguments.vocabulary)
        ratio = taken / median(seconds[forms[0]])
        print(f"| {tokens:,} | {entropy} | {taken:.2f} | {ratio:.2f} | {live.peak / 2**20:,.0f} |")


if __name__ == "__main__":
    main()
