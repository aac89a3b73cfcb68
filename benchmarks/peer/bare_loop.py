"""A learner's step against a bare loop over the same packed batches, in turn, in one process without a server.

    python -m benchmarks.peer.bare_loop RUN_DIR [--steps 20] [--threads 1]

The batches are those of a finished run, from its journal. The step is all that the learner does between taking a batch
and having published its weights. The bare loop has its micro-batches ready and makes nothing but the model's forward
pass, a cross-entropy, the backward pass, and AdamW. Prints medians of CPU seconds as JSON: one thread, so that other
work on the machine matters little. Prompts are encoded before either, as they are in a run.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.nn import functional as F

from asyncrl.processing.processor import PromptProcessor
from asyncrl_plugins.replay.replay import ReplayableRun
from learner.groups.recorded_batch import batch_again, read_batch
from learner.loop.trainer import Trainer
from learner.network.publication import open_publication, publish
from learner.tickets.ticket_writer import TicketWriter
from learner.training.batch import make_batch
from learner.training.engine import TorchEngine
from learner.training.packing import MicroBatch, build_micro_batch, plan_micro_batches


class BareLoop:
    def __init__(self, model: Any, optimizer: torch.optim.Optimizer):
        self._model, self._optimizer = model, optimizer

    def step(self, micro_batches: list[MicroBatch]) -> None:
        for micro_batch in micro_batches:
            hidden = self._model.base_model(**micro_batch.inputs, use_cache=False)[0][0]
            logits = self._model.get_output_embeddings()(hidden[micro_batch.predict_from])
            F.cross_entropy(logits, micro_batch.targets).backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)


def measure(run: ReplayableRun, steps: int, clock: Callable[[], float]) -> dict[str, float]:
    config = run.config
    processor = PromptProcessor(config.model)
    writer = TicketWriter(config.ticket_settings, processor, processor.ends.stop_token_ids)
    training = Trainer(config, processor, writer.num_train_rows)
    bare_engine = TorchEngine(config.model_settings, config.learner.optim, steps)
    bare_engine.prepare()
    updates: Any = bare_engine.updates  # torch's AdamW
    bare = BareLoop(bare_engine.unwrap_model(), updates.optimizer)
    seconds: dict[str, list[float]] = {"learn": [], "publish": [], "bare": []}
    with ExitStack() as resources:
        publication = resources.enter_context(open_publication("bare-loop"))
        for number in range(1, steps + 1):
            recorded = read_batch(run.journal, number, config.batch.prompts_per_step)
            groups = batch_again(recorded, writer.write, number - 1, config.learner.on_stale)
            plan = plan_micro_batches(make_batch(groups, processor).train_groups, config.batch.microbatch_tokens)
            micro_batches = [build_micro_batch(bare_engine.unwrap_model(), part, bare_engine.device) for part in plan]
            started = clock()
            training.learn(groups)
            learned = clock()
            publish(publication, training.engine, number, None)
            published = clock()
            bare.step(micro_batches)
            ended = clock()
            seconds["learn"].append(learned - started)
            seconds["publish"].append(published - learned)
            seconds["bare"].append(ended - published)
    return {name: median(values[2:]) for name, values in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--threads", type=int, default=1, help="of several the seconds are wall time")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    run = ReplayableRun.open(arguments.run_dir, 1, ())
    with closing(run.journal):
        clock = time.process_time if arguments.threads == 1 else time.perf_counter
        print(json.dumps(measure(run, arguments.steps, clock)))


if __name__ == "__main__":
    main()
