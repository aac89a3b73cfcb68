"""Engines against the learner: log-probs of the same sampled tokens, with images, in the configuration's dtype.

    python benchmarks/logprob_parity.py CONFIG [--engines hf vllm] [key=value ...]

Samples a group for each of the first rows with each engine, recomputes every token's log-prob through the learner's
packed forward pass, and prints the largest and the mean absolute difference. Without `--engines`: `hf`, and `vllm`
where it is installed.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import time
from pathlib import Path

import numpy as np
import torch

from asyncrl.config.load import load_config
from asyncrl.config.schema import RunConfig
from asyncrl.models.loading import stop_token_ids
from asyncrl.models.processing import PromptProcessor
from learner.engines import create_engine as create_train_engine
from learner.journal import TicketSlot
from learner.packing import Completion, TrainGroup, build_micro_batch, plan_micro_batches
from learner.ticket_writer import TicketWriter
from rollout_server.engines import create_engine
from rollout_server.engines.base import Completion as Sampled
from rollout_server.engines.base import GenerationRequest


async def sample(
    config: RunConfig, processor: PromptProcessor, rows: int
) -> tuple[list[GenerationRequest], list[Sampled], float]:
    """The requests of the first rows, all their completions, and the seconds that sampling took."""
    writer = TicketWriter(config, processor, stop_token_ids(config.model, processor.tokenizer))
    prepared = [writer.write(TicketSlot(i, i, version=0, bound=0)) for i in range(rows)]
    requests = [
        GenerationRequest(
            request_id=item.ticket.ticket_id,
            prompt=processor.encode(item.ticket.prompt, item.blobs),
            group_size=item.ticket.group_size,
            seed=item.ticket.seed,
            sampling=item.ticket.sampling,
            images=tuple(bytes(item.blobs[digest]) for digest in item.ticket.prompt.image_hashes),
        )
        for item in prepared
    ]
    engine = create_engine(config, processor)
    await engine.start()
    started = time.monotonic()
    completions = [completion async for completion in engine.generate(requests)]
    seconds = time.monotonic() - started
    await engine.close()
    return requests, completions, seconds


def differences(config: RunConfig, requests: list[GenerationRequest], completions: list[Sampled]) -> np.ndarray:
    """[N] |engine - learner| of every sampled token."""
    sampled = {(c.request_id, c.index): c for c in completions}
    size = config.batch.group_size
    groups = [
        TrainGroup(
            request.prompt,
            tuple(
                Completion(request.request_id * size + i, ids, np.ones(len(ids), np.uint8))
                for i in range(size)
                for ids in [sampled[request.request_id, i].token_ids]
            ),
        )
        for request in requests
    ]
    trainer = create_train_engine(config, config.learner.optim, total_updates=1)
    trainer.prepare()
    found: list[np.ndarray] = []
    for part in plan_micro_batches(groups, config.batch.tokens_per_microbatch):
        micro_batch = build_micro_batch(trainer.unwrap_model(), part, trainer.device)
        with torch.no_grad():
            learner = trainer.forward(micro_batch).logprobs.cpu().numpy()
        places = zip(micro_batch.row.tolist(), micro_batch.column.tolist(), strict=True)
        engine = np.asarray([sampled[divmod(row, size)].logprobs[column] for row, column in places])
        found.append(np.abs(engine - learner))
    return np.concatenate(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--rows", type=int, default=64)
    installed = ["hf", *(["vllm"] if importlib.util.find_spec("vllm") else [])]
    parser.add_argument("--engines", nargs="+", default=installed, choices=["hf", "vllm"])
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_intermixed_args()
    print("| engine | dtype | completions | tokens | tokens/s | max \\|engine - learner\\| | mean |")
    print("|---|---|---|---|---|---|---|")
    for engine in arguments.engines:
        config = load_config(arguments.config, [*arguments.overrides, f"rollout.engine={engine}"])
        processor = PromptProcessor(config.model)
        requests, completions, seconds = asyncio.run(sample(config, processor, arguments.rows))
        difference = differences(config, requests, completions)
        print(
            f"| {engine} | {config.model.dtype} | {len(completions)} | {difference.size} | "
            f"{difference.size / seconds:.0f} | {difference.max():.2e} | {difference.mean():.2e} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
