"""Lines of samples.jsonl: a group with its texts, and of a conversation its turns with what was called and shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from asyncrl.rewards.presentation import plain_text
from learner.tickets.ticket import ReceivedGroup
from protocol.messages import Group, ObservedMessage, TextPart, TrajectoryOrder

Decode = Callable[[np.ndarray], str]


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
        | ({"order": order} if (order := _named(item.ticket.order(index))) else {})
        | ({"end": record.end, "turns": _turns(group, index, decode)} if record.is_answered else {})
        for index, (record, ids) in enumerate(zip(group.trajectories, token_ids, strict=True))
    ]
    first_frames = [video.frame_hashes[0] for video in prompt.videos]
    images = {digest: item.prepared.blobs[digest] for digest in (*prompt.image_hashes, *first_frames)}
    images |= {digest: bytes(data) for digest, data in group.blobs.items()}
    sample = {
        "step": step,
        "row_id": prompt.row_id,
        "prompt": plain_text(prompt.messages[-1]),
        "answer": prompt.answer,
        "images": list(prompt.image_hashes),
        "videos": first_frames,
        "completions": completions,
    }
    return sample | ({"opening": _shown(group.opening)} if group.opening else {}), images


def _turns(group: Group, index: int, decode: Decode) -> list[dict[str, Any]]:
    start = group.span(index).start
    return [
        {
            "text": decode(group.token_ids[start + turn.start : start + turn.end]),
            "reward": turn.reward,
            "context": turn.context,
            "versions": sorted(set(group.versions[start + turn.start : start + turn.end].tolist())),
            "calls": [call.model_dump() for call in turn.calls],
            "info": turn.info,
            "shown": _shown(turn.observation),
        }
        for turn in group.trajectories[index].turns
    ]


def _shown(messages: Sequence[ObservedMessage]) -> list[dict[str, Any]]:
    """Texts as they are, images by their hash."""
    return [
        {
            "role": message.role,
            "parts": [p.text if isinstance(p, TextPart) else {"image": p.content_hash} for p in message.content],
        }
        for message in messages
    ]


def _named(order: TrajectoryOrder) -> str:
    """Name what a trajectory was asked for besides being sampled."""
    begins = f"begins with {len(order.prefix)} tokens that were put there" * bool(order.prefix)
    return ", ".join(filter(None, ("greedy" * order.greedy, begins, "saw distorted images" * bool(order.images))))
