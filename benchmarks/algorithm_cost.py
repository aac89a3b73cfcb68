"""Time and memory of credit and loss on a CPU, against the log-softmax of the same tokens.

    python -m benchmarks.algorithm_cost [--rows 1024] [--tokens 4096] [--vocabulary 32768] [--rounds 3]

Every estimator, loss and selection on random trajectories, in groups of eight, on one thread: credit once per batch; a
loss with its correction, aggregation and gradient by the log-probs. The log-softmax, and the choice of each token's
log-prob, is measured on SAMPLE tokens in chunks of 128 and scaled to all of them: neither the output layer before it
nor its gradient is counted. Prints Markdown: medians over rounds in which all take turns, their share of the
log-softmax, and the most bytes alive beside the inputs.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from asyncrl.algorithms.corrections import correct
from asyncrl.algorithms.loading import load_method
from asyncrl.algorithms.losses import token_weights
from asyncrl.algorithms.ratios import PolicyTokens
from asyncrl.algorithms.trajectories import Credit, Trajectories
from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.installed_methods import methods
from asyncrl.config.method import Kind, Method
from asyncrl.memory_plan.live_bytes import LiveBytes
from tests.rigs.provenance import provenance_of

KINDS: tuple[Kind, ...] = ("advantage", "policy_loss", "selection")
GROUP_SIZE = 8
SAMPLE = 8192
TURNS = 4
"""Turns of each trajectory."""


def made_up(rows: int, tokens: int) -> Trajectories:
    """Random trajectories of equal lengths with every column that a method may need."""
    generator = torch.Generator().manual_seed(0)

    def uniform() -> torch.Tensor:
        return torch.rand(rows * tokens, generator=generator)

    scores = torch.rand(rows, generator=generator).round()
    proximal = -3 * uniform()
    return Trajectories(
        scores=scores,
        group=torch.arange(rows) // GROUP_SIZE,
        row=torch.arange(rows).repeat_interleave(tokens),
        behaviour_logprobs=proximal + 0.1 * (uniform() - 0.5),
        components={"a": scores, "b": torch.rand(rows, generator=generator)},
        provenance=provenance_of(
            torch.arange(rows).repeat_interleave(tokens), baseline=torch.arange(rows) % GROUP_SIZE == 0
        ),
        proximal_logprobs=proximal,
        entropies=uniform(),
        squared_probabilities=uniform(),
        values=uniform(),
        turn=(torch.arange(rows * tokens) % tokens) * TURNS // tokens,
        turn_rewards=torch.zeros(rows * tokens),
        state=torch.zeros(rows * tokens, dtype=torch.long),
    )


def work_of(kind: Kind, method: Method, t: Trajectories, tokens: int) -> Callable[[], Any]:
    """The method's part of a learner step."""
    function = load_method(kind, method.name, kind)
    credit = Credit((t.scores - 0.5)[t.row])
    if kind == "advantage":
        return lambda: function(t, AlgorithmConfig(adv_estimator=method.name))
    if kind == "selection":
        return lambda: function(t, credit, AlgorithmConfig(selections=(method.name,)))
    config = AlgorithmConfig(policy_loss=method.name)
    assert t.proximal_logprobs is not None
    target = (t.proximal_logprobs + 0.01).requires_grad_()
    marked = torch.zeros(len(t.row), dtype=torch.bool)
    is_hybrid = "inserted" in method.needs
    of = PolicyTokens(
        target,
        t.proximal_logprobs,
        t.behaviour_logprobs,
        credit.advantages,
        t.row,
        marked,
        provenance=provenance_of(t.row, t.row % GROUP_SIZE == 0) if is_hybrid else None,
        entropies=t.entropies,
        scores=t.scores[t.row],
    )

    def step() -> None:
        token_loss = function(of, config).token_loss
        weights = token_weights(t.row, config.loss_agg_mode, max_response_length=tokens, group=t.group[t.row])
        correction = correct(of, config.correction)
        loss = (weights * torch.where(correction.masked, 0.0, correction.weights * token_loss)).sum()
        torch.autograd.grad(loss, target)

    return step


def log_softmax(vocabulary: int) -> None:
    """Log-probs of SAMPLE tokens, in chunks."""
    chunk = SAMPLE // 64  # small enough for a cache: nothing can be faster
    logits, targets = torch.randn(chunk, vocabulary), torch.randint(vocabulary, (chunk, 1))
    for _ in range(SAMPLE // chunk):
        torch.log_softmax(logits, dim=-1).gather(-1, targets)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=4096, help="of each row")
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    t = made_up(arguments.rows, arguments.tokens)
    chosen = [(kind, method) for kind in KINDS for method in methods(kind).values()]
    works = {(kind, method.name): work_of(kind, method, t, arguments.tokens) for kind, method in chosen}
    seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
    of_softmax: list[float] = []
    for _ in range(arguments.rounds):
        for name, work in works.items():
            seconds[name].append(_timed(work))
        of_softmax.append(_timed(lambda: log_softmax(arguments.vocabulary)) * len(t.row) / SAMPLE)
    whole = median(of_softmax)
    print(
        f"{arguments.rows:,} rows of {arguments.tokens:,} tokens; "
        f"log-softmax over {arguments.vocabulary:,}: {whole:.1f} s"
    )
    print("\n| | | CPU s | of the log-softmax | MiB at most |\n|---|---|---|---|---|")
    known = [column for column in vars(t).values() if isinstance(column, torch.Tensor)]
    for (kind, name), taken in seconds.items():
        with LiveBytes("cpu", known=known) as live:
            works[kind, name]()
        print(f"| {kind} | {name} | {median(taken):.2f} | {median(taken) / whole:.2%} | {live.peak / 2**20:,.0f} |")
    slowest = {kind: max(median(taken) for (other, _), taken in seconds.items() if other == kind) for kind in KINDS}
    print(f"\nslowest credit + selection + loss: {sum(slowest.values()) / whole:.1%} of the log-softmax")


def _timed(work: Callable[[], Any]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


if __name__ == "__main__":
    main()
