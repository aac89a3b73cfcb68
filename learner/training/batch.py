"""The groups of one learner step as rows and flat columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from asyncrl.models.processing import PromptProcessor
from learner.tickets.ticket import ReceivedGroup
from learner.training.packing import Completion, TrainGroup
from protocol.messages import TrajectoryStatus


@dataclass(frozen=True)
class Batch:
    """`B` rows are the trajectories of all groups in order; `M` runs over all their completion tokens.

    Rows that could not be scored stay in `B` (their score is NaN) but in no training group.
    """

    received: tuple[ReceivedGroup, ...]
    train_groups: tuple[TrainGroup, ...]
    scores: torch.Tensor
    """[B] fp32 reward of each row, NaN where there is none."""
    groups: torch.Tensor
    """[B] int64 group of each row."""
    row_start: np.ndarray
    """[B] where each row's tokens begin in the [M] columns."""
    behaviour_logprobs: torch.Tensor
    """[M] fp32"""
    versions: np.ndarray
    """[M] int32"""

    def flat_index(self, row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
        """[N], [N] -> [N] places in the [M] columns."""
        return torch.from_numpy(self.row_start)[row] + column


def make_batch(received: Sequence[ReceivedGroup], processor: PromptProcessor) -> Batch:
    """Rows in the order of the groups. Only scored rows with a trainable token are trained on.

    Images have stayed encoded until here; the processor's cache spares most of them a second decoding.
    """
    train_groups: list[TrainGroup] = []
    scores: list[float] = []
    group_of_row: list[int] = []
    lengths: list[int] = []
    for number, item in enumerate(received):
        group = item.group
        bounds = np.concatenate([[0], np.cumsum(group.lengths)])
        completions: list[Completion] = []
        for record, start, end in zip(group.trajectories, bounds[:-1], bounds[1:], strict=True):
            mask = group.loss_mask[start:end]
            if record.status.is_scored and mask.any():
                completions.append(Completion(len(scores), group.token_ids[start:end], mask))
            scores.append(float("nan") if record.reward is None else record.reward)
            group_of_row.append(number)
            lengths.append(int(end - start))
        if completions:
            prompt = processor.encode(item.ticket.prompt, item.prepared.blobs)
            train_groups.append(TrainGroup(prompt, tuple(completions)))
    return Batch(
        received=tuple(received),
        train_groups=tuple(train_groups),
        scores=torch.tensor(scores, dtype=torch.float32),
        groups=torch.tensor(group_of_row, dtype=torch.long),
        row_start=np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64),
        behaviour_logprobs=torch.from_numpy(np.concatenate([item.group.logprobs for item in received])),
        versions=np.concatenate([item.group.versions for item in received]),
    )


def describe_batch(batch: Batch, version: int, accuracy_component: str) -> dict[str, float]:
    """Rewards, statuses, lengths and staleness of a batch that is about to be trained at `version`."""
    records = [record for item in batch.received for record in item.group.trajectories]
    statuses = Counter(record.status for record in records)
    lengths = np.concatenate([item.group.lengths for item in batch.received])
    sampled = np.concatenate([item.group.loss_mask for item in batch.received]).astype(bool)
    staleness = version - batch.versions[sampled]
    described: dict[str, float] = {f"rows/{status}": float(statuses[status]) for status in TrajectoryStatus}
    described |= {
        "response_length/mean": float(lengths.mean()),
        "response_length/max": float(lengths.max()),
        "prompt_length/mean": float(np.mean([item.group.prompt_ids.size for item in batch.received])),
        "tokens": float(lengths.sum()),
        "staleness/mean": float(staleness.mean()) if staleness.size else 0.0,
        "staleness/max": float(staleness.max()) if staleness.size else 0.0,
    }
    scored = [record for record in records if record.reward is not None]
    for name in sorted({name for record in scored for name in record.rewards}):
        described[f"reward/{name}"] = float(np.mean([record.rewards[name] for record in scored]))
    if scored:
        rewards = np.asarray([record.reward for record in scored])
        described |= {"reward/mean": float(rewards.mean()), "reward/std": float(rewards.std())}
        described["accuracy"] = described[f"reward/{accuracy_component}"]
    described["zero_variance_groups"] = float(
        sum(
            np.ptp([record.reward for record in item.group.trajectories if record.reward is not None] or [0.0]) == 0
            for item in batch.received
        )
    )
    return described
