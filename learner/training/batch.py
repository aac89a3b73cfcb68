"""The groups of one learner step as rows and flat columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from asyncrl.models.processing import PromptProcessor
from learner.tickets.ticket import ReceivedGroup
from learner.training.packing import Completion, TrainGroup
from protocol.messages import TrajectoryStatus

MOST_NAMED = 3
"""Number of rows named in one message."""


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

    def trained_tokens(self, groups: Sequence[TrainGroup]) -> tuple[torch.Tensor, torch.Tensor]:
        """[N], [N]: row, and place in the [M] columns, of each trainable token of these groups."""
        completions = [c for group in groups for c in group.completions]
        columns = [torch.from_numpy(np.flatnonzero(c.loss_mask)) for c in completions]
        rows = [torch.full((len(column),), c.row) for c, column in zip(completions, columns, strict=True)]
        nothing = torch.zeros(0, dtype=torch.long)
        row = torch.cat([nothing, *rows])
        return row, self.flat_index(row, torch.cat([nothing, *columns]))

    def name_rows(self, rows: Iterable[int]) -> str:
        """Name rows as the user knows them: the prompt's row id and which of its completions."""
        names: list[str] = []
        for row in rows:
            group = int(self.groups[row])
            first = int(torch.searchsorted(self.groups, group))
            names.append(f"{self.received[group].ticket.prompt.row_id} (completion {row - first})")
        more = len(names) - MOST_NAMED
        return ", ".join(names[:MOST_NAMED]) + (f" and {more} more rows" if more > 0 else "")


def make_batch(received: Sequence[ReceivedGroup], processor: PromptProcessor) -> Batch:
    """Rows in the order of the groups. Only scored rows with a trainable token are trained on.

    Images have stayed encoded until here; the processor's cache spares most of them a second decoding.
    """
    train_groups: list[TrainGroup] = []
    scores: list[float] = []
    group_of_row: list[int] = []
    for number, item in enumerate(received):
        group = item.group
        completions: list[Completion] = []
        columns = (np.split(column, np.cumsum(group.lengths)[:-1]) for column in (group.token_ids, group.loss_mask))
        for record, token_ids, mask in zip(group.trajectories, *columns, strict=True):
            if record.status.is_scored and mask.any():
                completions.append(Completion(len(scores), token_ids, mask))
            scores.append(float("nan") if record.reward is None else record.reward)
            group_of_row.append(number)
        if completions:
            prompt = processor.encode(item.ticket.prompt, item.prepared.blobs)
            train_groups.append(TrainGroup(prompt, tuple(completions)))
    lengths = np.concatenate([item.group.lengths for item in received]).astype(np.int64)
    return Batch(
        received=tuple(received),
        train_groups=tuple(train_groups),
        scores=torch.tensor(scores, dtype=torch.float32),
        groups=torch.tensor(group_of_row, dtype=torch.long),
        row_start=np.cumsum(lengths) - lengths,
        behaviour_logprobs=torch.from_numpy(np.concatenate([item.group.logprobs for item in received])),
        versions=np.concatenate([item.group.versions for item in received]),
    )


def describe_batch(batch: Batch, version: int, accuracy_component: str) -> dict[str, float]:
    """Rewards, statuses, lengths and staleness of a batch that is about to be trained at `version`."""
    groups = [item.group for item in batch.received]
    records = [record for group in groups for record in group.trajectories]
    statuses = Counter(record.status for record in records)
    lengths = np.concatenate([group.lengths for group in groups])
    sampled = np.concatenate([group.loss_mask for group in groups]).astype(bool)
    staleness = version - batch.versions[sampled]
    described = {f"rows/{status}": float(statuses[status]) for status in TrajectoryStatus}
    described |= {
        "response_length/mean": float(lengths.mean()),
        "response_length/max": float(lengths.max()),
        "prompt_length/mean": float(np.mean([group.prompt_ids.size for group in groups])),
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
    rewards_of_groups = ({r.reward for r in group.trajectories if r.reward is not None} for group in groups)
    described["zero_variance_groups"] = float(sum(len(rewards) <= 1 for rewards in rewards_of_groups))
    return described
