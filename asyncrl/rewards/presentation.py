"""How a completion is presented to the rewards: the same in training and in evaluation.

Apart from `sample`, because reward workers import that and must start without the wire's models.
"""

from __future__ import annotations

from typing import Literal

from asyncrl.rewards.sample import RewardSample
from protocol.messages import Prompt


def sample_of(
    prompt: Prompt, completion: str, images: list[bytes], finish_reason: Literal["stop", "length"]
) -> RewardSample:
    """What the rewards see of a completion, in training and in evaluation alike. Images stand as `<image>` in texts."""
    messages = [
        {"role": m.role, "content": "".join("<image>" if part.type == "image" else part.text for part in m.content)}
        for m in prompt.messages
    ]
    return RewardSample(
        completion=completion,
        prompt=next((m["content"] for m in reversed(messages) if m["role"] == "user"), ""),
        messages=messages,
        answer=prompt.answer,
        columns=dict(prompt.columns),
        images=images,
        row_id=prompt.row_id,
        finish_reason=finish_reason,
    )
