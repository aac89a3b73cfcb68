"""Lines of samples.jsonl: a group with its texts, and of a conversation its turns with what was called and shown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from asyncrl.environments.recording import Decode, described_messages, described_turns
from asyncrl.rewards.sample import plain_text
from learner.groups.ticket import ReceivedGroup
from protocol.messages import TrajectoryRequest
from protocol.values import as_json


def sample_of_group(item: ReceivedGroup, step: int, decode: Decode) -> tuple[dict[str, Any], Mapping[str, bytes]]:
    """The line of a group that `step` trained, and the encoded images that it names, by content hash."""
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
