"""Packed against padded training passes on log-normal lengths, whole model, forward and backward, on a CPU.

    python -m benchmarks.packed_against_padded [--sequences 32] [--mean 192] [--hidden 256] [--layers 2] [--rounds 5]

Lengths have a coefficient of variation of 1. The padded form is a batch of rows as long as the longest, with
transformers' causal attention; the packed one is what training makes of the same rows, in one micro-batch. Both take
turns, on one thread. The ideal is the padded form's time without its padding; the Markdown table says how near packing
comes.
"""

from __future__ import annotations

import argparse
import copy
import math
import time
from statistics import median

import torch
import transformers

from asyncrl.attention import shared_prefix
from asyncrl.attention.shared_prefix import make_layout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--mean", type=int, default=192)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    shared_prefix.register()
    sigma = math.sqrt(math.log(2))  # a log-normal's coefficient of variation is sqrt(exp(sigma^2) - 1)
    drawn = torch.randn(arguments.sequences) * sigma + math.log(arguments.mean) - sigma**2 / 2
    lengths = drawn.exp().round().clamp_min(1).long().tolist()
    described = transformers.Qwen2Config(
        vocab_size=512,
        hidden_size=arguments.hidden,
        intermediate_size=4 * arguments.hidden,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.hidden // 64,
        num_key_value_heads=arguments.hidden // 64,
    )
    padded_model = transformers.AutoModel.from_config(described, attn_implementation="sdpa")
    packed_model = transformers.AutoModel.from_config(
        copy.deepcopy(described), attn_implementation=shared_prefix.SHARED_PREFIX_ATTENTION
    )
    packed_model.load_state_dict(padded_model.state_dict())
    rows = [torch.randint(512, (length,)) for length in lengths]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    real = torch.arange(ids.shape[1]) < torch.tensor(lengths)[:, None]

    def padded() -> torch.Tensor:
        # Causal: rows do not see the padding at their end, and need no mask.
        return padded_model(input_ids=ids, use_cache=False).last_hidden_state[real]

    def packed() -> torch.Tensor:
        layout = make_layout([(length, ()) for length in lengths], torch.device("cpu"), torch.float32)
        positions = torch.cat([torch.arange(length) for length in lengths])[None]
        states = packed_model(
            input_ids=torch.cat(rows)[None], position_ids=positions, use_cache=False, shared_prefix=layout
        )
        return states.last_hidden_state[0]

    torch.testing.assert_close(packed(), padded(), rtol=1e-3, atol=1e-4)
    forms = {"padded": padded, "packed": packed}
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(arguments.rounds):
        for name, compute in forms.items():
            started = time.process_time()
            compute().square().mean().backward()
            seconds[name].append(time.process_time() - started)
    tokens, share = sum(lengths), 1 - sum(lengths) / ids.numel()
    ideal = median(seconds["padded"]) * (1 - share)
    print(f"{len(lengths)} sequences of {min(lengths)} to {max(lengths)} tokens; padding share {share:.2f}\n")
    print("| form | CPU s | tokens/s | of the ideal |\n|---|---|---|---|")
    for name, found in seconds.items():
        taken = median(found)
        print(f"| {name} | {taken:.2f} | {tokens / taken:,.0f} | {ideal / taken:.2f} |")


if __name__ == "__main__":
    main()
