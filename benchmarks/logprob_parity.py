"""Engine against learner: log-probs of the same sampled tokens, with images, in the configuration's dtype.

    python benchmarks/logprob_parity.py CONFIG [key=value ...]

Samples a group for each of the first rows with the configured engine, recomputes every token's log-prob through the
learner's packed forward pass, and prints the largest and the mean absolute difference.
"""

from __future__ import annotations

import argparse
import asyncio
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
) -> tuple[list[GenerationRequest], list[Sampled]]:
    """The requests of the first rows and all their completions."""
    writer = TicketWriter(config, processor, stop_token_ids(config.model, processor.tokenizer))
    prepared = [writer.write(TicketSlot(i, i, version=0, bound=0)) for i in range(rows)]
    requests = [
        GenerationRequest(
            request_id=item.ticket.ticket_id,
            prompt=processor.encode(item.ticket.prompt, item.blobs),
            group_size=item.ticket.group_size,
            seed=item.ticket.seed,
            sampling=item.ticket.sampling,
        )
        for item in prepared
    ]
    engine = create_engine(config, processor)
    await engine.start()
    completions = [completion async for completion in engine.generate(requests)]
    await engine.close()
    return requests, completions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_intermixed_args()
    config = load_config(arguments.config, arguments.overrides)
    processor = PromptProcessor(config.model)
    requests, completions = asyncio.run(sample(config, processor, arguments.rows))
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
    differences: list[np.ndarray] = []
    for part in plan_micro_batches(groups, config.batch.tokens_per_microbatch):
        micro_batch = build_micro_batch(trainer.unwrap_model(), part, trainer.device)
        with torch.no_grad():
            learner = trainer.forward(micro_batch).logprobs.cpu().numpy()
        places = zip(micro_batch.row.tolist(), micro_batch.column.tolist(), strict=True)
        engine = np.asarray([sampled[divmod(row, size)].logprobs[column] for row, column in places])
        differences.append(np.abs(engine - learner))
    difference = np.concatenate(differences)
    print(
        f"{difference.size} tokens of {len(completions)} completions with images, {config.model.dtype}: "
        f"max |engine - learner| = {difference.max():.2e}, mean {difference.mean():.2e}"
    )


if __name__ == "__main__":
    main()
