"""A batch of random completions without an engine, and a training engine that keeps gradients. For tests of a step.

Where tickets have requests, completions begin with what they put there.
"""

from __future__ import annotations

import numpy as np
import torch

from asyncrl.config.schema import RunConfig
from asyncrl.journal.writer import TicketSlot
from asyncrl.processing.processor import PromptProcessor
from learner.groups.ticket import ReceivedGroup
from learner.tickets.ticket_writer import TicketWriter
from learner.training.batch import Batch, make_batch
from learner.training.engine import TorchEngine
from protocol.messages import FinishReason, Group, GroupTimings, Ticket, TokenSource, TrajectoryRecord, TrajectoryStatus


def made_up_batch(config: RunConfig, processor: PromptProcessor) -> Batch:
    """Random completions of unequal lengths, of policy versions 0 to 2, with one unscored row; no engine involved."""
    rng = np.random.default_rng(0)
    writer = TicketWriter(config.ticket_settings, processor, (processor.tokenizer.eos_token_id,))
    received = []
    size = config.trajectories_per_group
    usable = [i for i in range(len(processor.tokenizer)) if i not in processor.placeholder_ids]
    for number in range(config.batch.prompts_per_step):
        item = writer.write(TicketSlot(number, number, version=0, bound=0))
        prompt = processor.encode(item.ticket.prompt, item.blobs)
        lengths = rng.integers(1, config.data.max_response_length + 1, size)
        total = int(lengths.sum())
        records = []
        for index in range(size):
            scored = (number, index) != (1, 2)
            status = TrajectoryStatus.FINISHED if scored else TrajectoryStatus.ERROR
            reward = float(rng.random()) if scored else None
            kind = "" if scored else "reward_exception"
            records.append(
                TrajectoryRecord(
                    status=status, finish_reason=FinishReason.STOP, error_kind=kind, reward=reward, turns=()
                )
            )
        source = np.where(rng.random(total) < 0.1, TokenSource.OBSERVATION, TokenSource.POLICY).astype(np.uint8)
        group = Group(
            ticket_id=number,
            server_id="s",
            prompt_ids=prompt.token_ids,
            image_grids=prompt.image_grids,
            image_hashes=prompt.image_hashes,
            lengths=lengths.astype(np.int32),
            token_ids=rng.choice(usable, total).astype(np.int32),
            source=source,
            logprobs=(-6 + rng.normal(0, 0.3, total)).astype(np.float32),
            versions=np.full(total, number % 3, np.int32),
            trajectories=tuple(records),
            timings=GroupTimings(generate_s=0, reward_s=0),
        )
        received.append(ReceivedGroup(item, _ordered(group, item.ticket, processor.tokenizer.eos_token_id)))
    return make_batch(received, processor, inserted="inserted" in config.algorithm.needs)


def _ordered(group: Group, ticket: Ticket, stop: int) -> Group:
    """The group with the prefixes of its ticket's requests; behind a demonstration there is nothing."""
    if not ticket.requests:
        return group
    names = ("token_ids", "source", "logprobs", "versions")
    rows = zip(*(np.split(getattr(group, name), np.cumsum(group.lengths)[:-1]) for name in names), strict=True)
    made: list[list[np.ndarray]] = []
    for row, request in zip(rows, ticket.requests, strict=True):
        count = len(request.prefix)
        room = 0 if request.prefix[-1:] == (stop,) else ticket.sampling.max_new_tokens - count
        put_in = (
            np.asarray(request.prefix),
            np.full(count, TokenSource.INSERTED),
            np.zeros(count),
            np.full(count, row[3][0]),
        )
        made.append([np.append(a, b[:room]).astype(b.dtype) for a, b in zip(put_in, row, strict=True)])
    columns = {name: np.concatenate(parts) for name, parts in zip(names, zip(*made, strict=True), strict=True)}
    facts = [{"role": ticket.role(i), "image_hashes": ticket.request(i).images} for i in range(ticket.group_size)]
    records = (record.model_copy(update=each) for record, each in zip(group.trajectories, facts, strict=True))
    lengths = np.asarray([len(row[0]) for row in made], np.int32)
    return group.model_copy(update=columns | {"lengths": lengths, "trajectories": tuple(records)})


class KeepGradients(TorchEngine):
    """Looks at the gradients instead of taking the step."""

    def optimizer_step(self) -> dict[str, float]:
        self.gradients = {
            name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in self.model.named_parameters()
        }
        self.model.zero_grad(set_to_none=True)
        return {"grad_norm": float(torch.stack([g.norm() for g in self.gradients.values()]).norm())}
