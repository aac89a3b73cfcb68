"""Engines against the learner: log-probs of the same sampled tokens, with images, in the configuration's dtype.

    python benchmarks/logprob_parity.py CONFIG [--engines hf vllm] [--quantizations '' fp8] [key=value ...]

Samples a group for each of the first rows with each engine, recomputes every token's log-prob through the learner's
packed forward pass, and prints the largest and the mean absolute difference, and the mismatch KL. Without `--engines`:
`hf`, and `vllm` where it is installed. Quantisations that an engine has not are left out.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import time
from itertools import product
from pathlib import Path
from typing import Any

from asyncrl.config.load import load_config
from asyncrl.config.schema import RunConfig
from asyncrl.devices.device import resolve_dtype
from asyncrl.journal.writer import TicketSlot
from asyncrl.processing.processor import PromptProcessor
from learner.groups.ticket import ReceivedGroup
from learner.loop.logprob_parity import compare
from learner.tickets.ticket_writer import TicketWriter
from learner.training.engine import TorchEngine
from protocol.messages import Group, TicketKind
from rollout_server.engines import create_engine
from rollout_server.production.group_producer import GroupProducer


async def sample(config: RunConfig, processor: PromptProcessor, rows: int) -> tuple[list[ReceivedGroup], float]:
    """A group of each of the first rows, as a server makes it but without rewards, and the seconds that it took."""
    writer = TicketWriter(config.ticket_settings, processor, processor.ends.stop_token_ids)
    items = [writer.write(TicketSlot(i, i, version=0, bound=0)) for i in range(rows)]
    tickets = [item.ticket.model_copy(update={"kind": TicketKind.PARITY}) for item in items]
    blobs = {digest: memoryview(data) for item in items for digest, data in item.blobs.items()}
    engine = create_engine(config, processor)
    await engine.start()
    no_rewards: Any = None
    started = time.monotonic()
    producer = GroupProducer(engine, no_rewards, processor, "benchmark")
    made = [answer async for answer in producer.produce(tickets, blobs)]
    groups = {group.ticket_id: group for group in made if isinstance(group, Group)}
    seconds = time.monotonic() - started
    await engine.close()
    return [ReceivedGroup(item, groups[item.ticket.ticket_id]) for item in items], seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--rows", type=int, default=64)
    installed = ["hf", *(["vllm"] if importlib.util.find_spec("vllm") else [])]
    parser.add_argument("--engines", nargs="+", default=installed, choices=["hf", "vllm"])
    parser.add_argument("--quantizations", nargs="+", default=[""], choices=["", "fp8", "int8"])
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_intermixed_args()
    print("| engine | dtype | weights | completions | tokens | tokens/s | max \\|engine - learner\\| | mean | KL |")
    print("|---|---|---|---|---|---|---|---|---|")
    for engine, quantization in product(arguments.engines, arguments.quantizations):
        overrides = [*arguments.overrides, f"rollout.engine={engine}", f"rollout.quantization={quantization}"]
        config = resolve_dtype(load_config(arguments.config, overrides))
        processor = PromptProcessor(config.model)
        received, seconds = asyncio.run(sample(config, processor, arguments.rows))
        trainer = TorchEngine(config.model_settings, config.learner.optim, total_updates=1)
        trainer.prepare()
        parity = compare(trainer, processor, received, config.batch.microbatch_tokens)
        completions = sum(one.group.lengths.size for one in received)
        print(
            f"| {engine} | {config.model.dtype} | {quantization or 'own'} | {completions} | {parity.token_ids.size} | "
            f"{parity.token_ids.size / seconds:.0f} | "
            f"{parity.largest:.2e} | {parity.mean:.2e} | {parity.kl:.2e} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
