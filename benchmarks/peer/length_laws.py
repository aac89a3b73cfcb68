"""Models whose completions have lengths by a law, whichever framework samples them.

A law is a chain over tokens: the first token chooses a class, each token of a class is followed by the end with the
class's own probability. A model that has learnt it ends its completions by itself: no framework needs a setting for
it, and each sees the lengths that an ordinary run would show it, one after another. Every class has an even and an odd
digit, drawn alike; the reward is an even first digit, so that there is something to learn that no length depends on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from asyncrl.config.run_sections import SftOptimConfig
from asyncrl.config.schema import RunConfig
from asyncrl.journal.writer import TicketSlot
from asyncrl.models.loading import stop_token_ids
from asyncrl.models.output_head import hidden_states, scaled_logits
from asyncrl.models.processing import PromptProcessor
from learner.tickets.ticket_writer import TicketWriter
from learner.training.engine import create_engine
from learner.training.packing import Completion, TrainGroup, build_micro_batch

PROMPTS, COMPLETIONS = 8, 4
"""Prompts of a training step, and completions of each."""
REWARD = {"function": "regex_match", "kwargs": {"pattern": r"^\s*[02468]"}, "name": "even"}


@dataclass(frozen=True)
class LengthLaw:
    """Completions of at most `longest` tokens, the end included."""

    longest: int
    shares: tuple[float, ...]
    """Probability of each class."""
    means: tuple[float, ...]
    """Mean number of tokens of each class before the end; inf: no completion ends by itself."""

    def table(self, digits: Sequence[int], end: int, vocabulary: int) -> torch.Tensor:
        """[V + 1, V] probability of each next token after each token; the last row: after the prompt."""
        table = torch.zeros(vocabulary + 1, vocabulary)
        for number, (share, mean) in enumerate(zip(self.shares, self.means, strict=True)):
            pair = list(digits[2 * number : 2 * number + 2])
            table[-1, pair] = share / 2
            for token in pair:
                table[token, pair] = (1 - 1 / mean) / 2
                table[token, end] = 1 / mean
        return table


LAWS = {
    "64 tokens": LengthLaw(64, (1.0,), (float("inf"),)),
    "heavy tails": LengthLaw(128, (0.75, 0.2, 0.05), (4.0, 20.0, 80.0)),
}


def make_model(config: RunConfig, law: LengthLaw, folder: Path, steps: int) -> None:
    """Teach `config`'s model the law, on `config`'s prompts, and export it. Prints how near it has come."""
    torch.manual_seed(0)
    random = np.random.default_rng(0)
    processor = PromptProcessor(config.model)
    ends = stop_token_ids(config.model, processor.tokenizer)
    writer = TicketWriter(config, processor, ends)
    optim = SftOptimConfig(
        lr=1e-3, betas=(0.9, 0.95), lr_warmup_steps=20, lr_scheduler_type="cosine", min_lr_ratio=0.05
    )
    engine = create_engine(config, optim, steps)
    engine.prepare()
    model = engine.unwrap_model()
    digits = [processor.tokenizer(f" {digit}")["input_ids"] for digit in range(10)]
    assert all(len(ids) == 1 for ids in digits), "a digit is not one token of this tokenizer"
    table = law.table([ids[0] for ids in digits], ends[0], model.get_output_embeddings().weight.shape[0])
    for step in range(steps):
        groups: list[TrainGroup] = []
        for place in range(PROMPTS):
            slot = TicketSlot(place, (step * PROMPTS + place) % writer.num_train_rows, version=0, bound=0)
            item = writer.write(slot)
            completions = [_sample(table, law.longest, random) for _ in range(COMPLETIONS)]
            rows = tuple(Completion(0, ids, np.ones_like(ids)) for ids in completions)
            groups.append(TrainGroup(processor.encode(item.ticket.prompt, item.blobs), rows))
        micro_batch = build_micro_batch(model, groups, engine.device)
        logits = scaled_logits(model, hidden_states(model, micro_batch.inputs)[micro_batch.predict_from])
        before = torch.cat([torch.tensor([-1]), micro_batch.targets[:-1]])
        before[micro_batch.column == 0] = len(table) - 1
        law_probs = table[before]
        logprobs = torch.log_softmax(logits.float(), dim=-1)
        divergence = (torch.special.xlogy(law_probs, law_probs) - law_probs * logprobs).sum(-1)
        engine.backward(divergence.mean())
        engine.optimizer_step()
    print(f"{folder.name}: KL from the law {float(divergence.detach().mean()):.1e} nats a token", flush=True)
    engine.export(processor.processor, folder)


def _sample(table: torch.Tensor, longest: int, random: np.random.Generator) -> np.ndarray:
    """One completion of the chain, cut at `longest`. [T] int32"""
    tokens: list[int] = []
    row = table[-1]
    while len(tokens) < longest and float(row.sum()) > 0:  # nothing follows the end
        probs = row.double().numpy()
        tokens.append(int(random.choice(len(probs), p=probs / probs.sum())))
        row = table[tokens[-1]]
    return np.asarray(tokens, np.int32)
