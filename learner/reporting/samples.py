"""Samples of a run, for readers: lines of samples.jsonl, and the interface of a plug-in that keeps all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from asyncrl.environments.recording import Decode, described_messages, described_turns
from asyncrl.rewards.sample import plain_text
from learner.groups.ticket import ReceivedGroup
from learner.training.batch import TrainedBatch
from protocol.messages import Group, Prompt, TrajectoryRequest
from protocol.values import as_json


class SampleWriter(Protocol):
    """Keeps the samples of a run (`asyncrl.sample_writers`); made with the run's folder. A background thread calls it,
    and an error of it ends the run."""

    def write(self, step: int, version: int, batch: Sequence[tuple[Prompt, Group]], trained: TrainedBatch) -> None:
        """Add the groups that `version` consumed at `step`. Steps that are made again are written again."""

    def truncate_after(self, step: int) -> None:
        """Forget later steps: the run goes on from `step`, with other groups."""

    def forget_tokens(self, before_step: int) -> None:
        """Forget token values of earlier steps, whose groups the journal does not keep any more."""

    def close(self) -> None: ...


def sample_of_group(item: ReceivedGroup, step: int, decode: Decode) -> tuple[dict[str, Any], Mapping[str, bytes]]:
    """The line of samples.jsonl of a group that `step` trained: texts, and of a conversation its turns with what was
    called and shown; and the encoded images that it names, by content hash."""
    prompt, group = item.ticket.prompt, item.group
    token_ids = np.split(group.token_ids, np.cumsum(group.lengths)[:-1])
    completions = [
        {
            "text": decode(ids),
            "reward": record.reward,
            "rewards": record.rewards,
            "status": str(record.status),
            "error": record.error_message,
            "finish_reason": str(record.finish_reason),
            "length": len(ids),
            "token_ids": ids.tolist(),
        }
        | ({"request": request} if (request := _named(item.ticket.request(index))) else {})
        | ({"end": record.end, "turns": described_turns(group, index, decode)} if record.is_answered else {})
        for index, (record, ids) in enumerate(zip(group.trajectories, token_ids, strict=True))
    ]
    first_frames = [video.frame_hashes[0] for video in prompt.videos]
    images = {digest: item.prepared.blobs[digest] for digest in (*prompt.image_hashes, *first_frames)}
    images |= {digest: bytes(data) for digest, data in group.blobs.items()}
    sample = {
        "step": step,
        "row_id": prompt.row_id,
        "prompt": plain_text(prompt.messages[-1]),
        "answer": as_json(prompt.answer),
        "images": list(prompt.image_hashes),
        "videos": first_frames,
        "completions": completions,
    }
    return sample | ({"opening": described_messages(group.opening)} if group.opening else {}), images


def _named(request: TrajectoryRequest) -> str:
    """Name what a trajectory was asked for besides being sampled."""
    begins = f"begins with {len(request.prefix)} tokens that were put there" * bool(request.prefix)
    return ", ".join(filter(None, ("greedy" * request.greedy, begins, "saw distorted images" * bool(request.images))))
