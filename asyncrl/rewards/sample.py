"""The argument of a reward function."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:  # a reward worker begins without pydantic
    from protocol.messages import ChatMessage, Prompt


@dataclass(frozen=True)
class RewardSample:
    """One completion and the dataset row that it answers.

    `answer` and `columns` are as the file has them: also dates, times, durations, decimals, bytes and maps
    (`protocol.values`). Tuples arrive as lists.

    Example:
        RewardSample(completion="It is 7.", prompt="What is 3 + 4?", answer="7", row_id="train.jsonl:12")
    """

    completion: str
    """Text that the policy sampled, without special tokens."""
    prompt: str = ""
    """Text of the last user message."""
    messages: list[dict[str, Any]] = field(default_factory=list)
    """The whole prompt as chat messages."""
    answer: Any = None
    """The row's reference answer (`data.answer_key`)."""
    columns: dict[str, Any] = field(default_factory=dict)
    """The row's other columns by name."""
    images: list[bytes] = field(default_factory=list)
    """Encoded bytes (PNG, JPEG, ...) in order of appearance."""
    videos: list[list[bytes]] = field(default_factory=list)
    """Encoded frames of each video."""
    row_id: str = ""
    """Names the row: `<file or dataset>:<index>`."""
    finish_reason: Literal["stop", "length"] = "stop"
    """`length`: the completion was cut at `max_tokens`."""
    num_tokens: int = 0
    """Tokens of the completion, the one that stopped it included."""
    max_tokens: int = 0
    """Most tokens that it could have (`data.max_response_length`); 0 where there was no limit."""


OF_THE_COMPLETION = ("completion", "finish_reason", "num_tokens", "max_tokens")
"""Fields in which the samples of one group differ; the others are the row's."""


def plain_text(message: ChatMessage) -> str:
    """Text of a message, with `<image>` and `<video>` where they stand."""
    return "".join(part.text if part.type == "text" else f"<{part.type}>" for part in message.content)


def plain_message(message: ChatMessage) -> dict[str, Any]:
    """A message of a prompt as rewards and environments get it: role, text as content, and other keys of the row's."""
    return {**message.others, "role": message.role, "content": plain_text(message)}


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
    messages = list(map(plain_message, prompt.messages))
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
