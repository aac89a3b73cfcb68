"""New weights under running sequences: what `recompute`, `keep` and `drain` cost, and whose tokens they give.

    python benchmarks/weight_updates.py CONFIG [--groups 32] [--median-length 64] [key=value ...]

The engine samples groups of log-normal lengths, more than fit together, without updates and then with `--updates`
of them in each mode, evenly spread over the tokens. The versions are real optimiser steps with the configuration's
learning rate, towards random advantages. All settings are run in turn and repeated, so that a change of the machine's
speed meets all of them; the process's CPU time per token, which other processes disturb less, stands beside the
clock's. The log-probs of tokens sampled after a switch are compared with the learner's, computed by a
packed forward pass with the weights of the version that each token is stamped with.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import torch
import transformers

from asyncrl.config.load import load_config
from asyncrl.config.schema import RunConfig
from asyncrl.devices.device import resolve_dtype
from asyncrl.journal.writer import TicketSlot
from asyncrl.models.published import load_published
from asyncrl.processing.processor import PromptProcessor
from learner.tickets.ticket_writer import TicketWriter
from learner.training.engine import TorchEngine
from learner.training.packing import PackedTrajectory, TrainGroup, build_micro_batch, plan_micro_batches
from rollout_server.engines import create_engine
from rollout_server.engines.base import Completion, GenerationRequest

Weights = dict[str, torch.Tensor]
MODES = ("recompute", "keep", "drain")
LENGTH_SIGMA = 0.8
POLL_S = 0.003


@dataclass(frozen=True)
class Run:
    """One pass over all requests."""

    completions: list[Completion]
    seconds: float
    cpu_s: float
    """Processor seconds of this process, all threads."""
    updates: int
    """Updates that met running sequences."""
    pause_s: float
    """Seconds of all updates in which nothing was decoded."""
    until_in_place_s: list[float]
    """Seconds of each update, from the order to the new policy."""

    @property
    def tokens_per_s(self) -> float:
        return sum(len(c.token_ids) for c in self.completions) / self.seconds


def requests_of(config: RunConfig, processor: PromptProcessor, groups: int, longest: float) -> list[GenerationRequest]:
    """Lengths are given, one per group: all runs sample the same number of tokens."""
    writer = TicketWriter(config.ticket_settings, processor, processor.ends.stop_token_ids)
    lengths = np.random.default_rng(1).lognormal(np.log(longest), LENGTH_SIGMA, groups).round().clip(2, 512)
    requests = []
    for ticket_id, length in enumerate(lengths.astype(int).tolist()):
        item = writer.write(TicketSlot(ticket_id, ticket_id, version=0, bound=0))
        sampling = item.ticket.sampling.model_copy(update={"max_new_tokens": length, "stop_token_ids": ()})
        prompt = processor.encode(item.ticket.prompt, item.blobs)
        requests.append(GenerationRequest(ticket_id, prompt, item.ticket.group_size, item.ticket.seed, sampling))
    return requests


async def sample(
    config: RunConfig,
    processor: PromptProcessor,
    requests: Sequence[GenerationRequest],
    policies: Sequence[Weights],
) -> Run:
    """All completions, with policies 1, 2, ... put in place one after another, evenly spread over the tokens."""
    tokens_per_update = sum(r.group_size * r.sampling.max_new_tokens for r in requests) / len(policies)
    engine = create_engine(config, processor)
    await engine.start()
    until_in_place: list[float] = []

    async def update() -> None:
        for version, weights in list(enumerate(policies))[1:]:
            while engine.usage.tokens_generated < version * tokens_per_update:
                await asyncio.sleep(POLL_S)
            ordered = time.monotonic()
            await engine.update_weights(version, weights.items())
            until_in_place.append(time.monotonic() - ordered)

    started, cpu_started = time.monotonic(), time.process_time()
    updating = asyncio.create_task(update())
    completions = [completion async for completion in engine.generate(requests)]
    seconds, cpu_s = time.monotonic() - started, time.process_time() - cpu_started
    pause_s = engine.usage.update_pause_s
    await updating
    await engine.close()
    return Run(completions, seconds, cpu_s, len(until_in_place), pause_s, until_in_place)


def train_groups(requests: Sequence[GenerationRequest], completions: Sequence[Completion]) -> list[TrainGroup]:
    """Rows are numbered request by request."""
    sampled = {(c.request_id, c.index): c.token_ids for c in completions}
    groups: list[TrainGroup] = []
    row = 0
    for request in requests:
        columns = [sampled[request.request_id, index] for index in range(request.group_size)]
        rows = [PackedTrajectory(row + i, ids, np.ones(len(ids), np.uint8)) for i, ids in enumerate(columns)]
        groups.append(TrainGroup(request.prompt, tuple(rows)))
        row += request.group_size
    return groups


def train(config: RunConfig, trainer: TorchEngine, groups: Sequence[TrainGroup], updates: int) -> list[Weights]:
    """The initial policy and those after each optimiser step."""
    random = torch.Generator().manual_seed(1)
    policies = [{name: tensor.clone() for name, tensor in trainer.published_state()}]
    tokens = sum(len(c.token_ids) for group in groups for c in group.completions)
    for _ in range(updates):
        for part in plan_micro_batches(groups, config.batch.microbatch_tokens):
            micro_batch = build_micro_batch(trainer.unwrap_model(), part, trainer.device)
            logprobs = trainer.forward(micro_batch).logprobs
            advantages = torch.randn(int(micro_batch.row.max()) + 1, generator=random).to(trainer.device)
            trainer.backward(-(advantages[micro_batch.row.to(trainer.device)] * logprobs).sum() / tokens)
        trainer.optimizer_step()
        policies.append({name: tensor.clone() for name, tensor in trainer.published_state()})
    return policies


def gaps_after_switch(
    config: RunConfig,
    trainer: TorchEngine,
    requests: Sequence[GenerationRequest],
    run: Run,
    policies: Sequence[Weights],
) -> np.ndarray:
    """|engine - learner| of every token whose sequence had begun under an older policy."""
    ordered = sorted(run.completions, key=lambda c: (c.request_id, c.index))
    groups = train_groups(requests, run.completions)
    found: list[float] = []
    for version in sorted({int(v) for c in ordered for v in np.unique(c.versions) if v > c.versions[0]}):
        load_published(trainer.unwrap_model(), policies[version].items())
        for part in plan_micro_batches(groups, config.batch.microbatch_tokens):
            micro_batch = build_micro_batch(trainer.unwrap_model(), part, trainer.device)
            with torch.no_grad():
                learner = trainer.forward(micro_batch).logprobs.cpu().numpy()
            places = zip(micro_batch.row.tolist(), micro_batch.column.tolist(), learner, strict=True)
            for row, column, logprob in places:
                completion = ordered[row]
                if completion.versions[column] == version > completion.versions[0]:
                    found.append(abs(float(completion.logprobs[column]) - float(logprob)))
    return np.asarray(found)


def with_mode(config: RunConfig, mode: str) -> RunConfig:
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"weight_update": mode})})


def table(runs: Mapping[str, list[Run]], gaps: Mapping[str, np.ndarray]) -> str:
    """Medians over the repeats; ratios are taken within each repeat."""
    lines = [
        "| weight_update | updates | pause each | until in place | tokens/s | against no updates | in CPU time "
        "| tokens after a switch | max gap | mean gap |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    plain = [run.tokens_per_s for run in runs["no updates"]]
    lines.append(f"| no updates | 0 | | | {median(plain):,.0f} | 1.00 | 1.00 | 0 | | |")
    for mode in MODES:
        pause = median(1000 * run.pause_s / run.updates for run in runs[mode])
        place = median(1000 * s for run in runs[mode] for s in run.until_in_place_s)
        ratios = [run.tokens_per_s / base for run, base in zip(runs[mode], plain, strict=True)]
        cpu = [base.cpu_s / run.cpu_s for run, base in zip(runs[mode], runs["no updates"], strict=True)]
        speed = median(run.tokens_per_s for run in runs[mode])
        gap = gaps[mode]
        worst = f"{gap.max():.1e} | {gap.mean():.1e}" if gap.size else "|"
        lines.append(
            f"| {mode} | {runs[mode][0].updates} | {pause:.1f} ms | {place:.1f} ms | {speed:,.0f} | "
            f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) | "
            f"{median(cpu):.2f} ({min(cpu):.2f} to {max(cpu):.2f}) | {gap.size} | {worst} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--median-length", type=float, default=64)
    parser.add_argument("--updates", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_intermixed_args()
    config = resolve_dtype(load_config(arguments.config, arguments.overrides))
    if config.rollout.cpu_threads:
        torch.set_num_threads(config.rollout.cpu_threads)
    processor = PromptProcessor(config.model)
    requests = requests_of(config, processor, arguments.groups, arguments.median_length)
    trainer = TorchEngine(config.model_settings, config.learner.optim, total_updates=arguments.updates)
    trainer.prepare()
    initial = [{name: tensor.clone() for name, tensor in trainer.published_state()}]
    warm_up = asyncio.run(sample(config, processor, requests, initial))
    policies = train(config, trainer, train_groups(requests, warm_up.completions), arguments.updates)
    runs: dict[str, list[Run]] = {name: [] for name in ("no updates", *MODES)}
    for _ in range(arguments.repeats):
        runs["no updates"].append(asyncio.run(sample(config, processor, requests, initial)))
        for mode in MODES:
            runs[mode].append(asyncio.run(sample(with_mode(config, mode), processor, requests, policies)))
    gaps = {mode: gaps_after_switch(config, trainer, requests, runs[mode][-1], policies) for mode in MODES}
    tokens = sum(len(c.token_ids) for c in warm_up.completions)
    print(
        f"{len(warm_up.completions)} completions, {tokens} tokens (median length {arguments.median_length:g}, at most "
        f"{config.rollout.max_concurrent_sequences} together), {arguments.updates} updates, median of "
        f"{arguments.repeats} repeats, {config.model.dtype}; {torch.get_num_threads()} threads of {os.cpu_count()} "
        f"cores ({platform.machine()}), torch {torch.__version__}, transformers {transformers.__version__}\n"
    )
    print(table(runs, gaps))


if __name__ == "__main__":
    main()
