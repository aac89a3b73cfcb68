"""Observations as a group records them: text, and images by content hash with their bytes beside them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from asyncrl.data.images import content_hash
from asyncrl.environments.observation import Message, Observation
from asyncrl.errors import UserError
from protocol.messages import ObservedImage, ObservedMessage, TextPart


def recorded(observation: Observation, grids: Iterable[Sequence[int]]) -> tuple[ObservedMessage, ...]:
    """The messages of an observation; `grids` are those of its images, in order."""
    rest = iter(grids)
    return tuple(
        ObservedMessage(
            role=message.role,
            content=tuple(
                TextPart(text=part)
                if isinstance(part, str)
                else ObservedImage(content_hash=content_hash(part), grid=_three(next(rest)))
                for part in message.parts
            ),
        )
        for message in observation.messages
    )


def _three(grid: Sequence[int]) -> tuple[int, int, int]:
    temporal, height, width = map(int, grid)
    return temporal, height, width


def observation_of(messages: Iterable[ObservedMessage], blobs: Mapping[str, bytes | memoryview]) -> Observation:
    """The observation that was recorded. Raises UserError where `blobs` has not the bytes of an image, or others."""
    found: list[Message] = []
    for message in messages:
        for digest in (image.content_hash for image in images_of([message])):
            if digest not in blobs:
                raise UserError(f"the image {digest[:12]} of an observation came without its bytes")
            if (other := content_hash(blobs[digest])) != digest:
                raise UserError(f"the bytes of the image {digest[:12]} of an observation have the hash {other[:12]}")
        parts = (p.text if isinstance(p, TextPart) else bytes(blobs[p.content_hash]) for p in message.content)
        found.append(Message(message.role, tuple(parts)))
    return Observation(tuple(found))


def images_of(messages: Iterable[ObservedMessage]) -> list[ObservedImage]:
    """The images of messages, in order of appearance."""
    return [part for message in messages for part in message.content if isinstance(part, ObservedImage)]
