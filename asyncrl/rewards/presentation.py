"""Conversion of a completion into a RewardSample, in training and in evaluation alike.

Apart from `sample`, because reward workers import that and must start without the wire's models.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from asyncrl.rewards.sample import RewardSample
from protocol.messages import ChatMessage, Prompt


def plain_text(message: ChatMessage) -> str:
    """Text of a message, with `<image>` and `<video>` where they stand."""
    return "".join(part.text if part.type == "text" else f"<{part.type}>" for part in message.content)


def sample_of(
    prompt: Prompt,
    completion: str,
    blobs: Mapping[str, bytes],
    finish_reason: Literal["stop", "length"],
    *,
    num_tokens: int,
    max_tokens: int,
) -> RewardSample:
    """The sample that rewards get for a completion. `blobs` are the prompt's images and frames by hash."""
    messages = [{"role": message.role, "content": plain_text(message)} for message in prompt.messages]
    return RewardSample(
        completion=completion,
        prompt=next((m["content"] for m in reversed(messages) if m["role"] == "user"), ""),
        messages=messages,
        answer=prompt.answer,
        columns=dict(prompt.columns),
        images=[blobs[digest] for digest in prompt.image_hashes],
        videos=[[blobs[digest] for digest in video.frame_hashes] for video in prompt.videos],
        row_id=prompt.row_id,
        finish_reason=finish_reason,
        num_tokens=num_tokens,
        max_tokens=max_tokens,
    )
