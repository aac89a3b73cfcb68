"""Seeded damage to valid messages: to their bytes, their frames, the tree of their header, and their meaning."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from typing import Any

import msgpack

from protocol.codec import encode
from protocol.messages import Group, Wire
from tests.rigs.fuzz import content

Frames = list[bytes]
NASTY: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 2**31 - 1, 2**31, 2**53, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), 0.5, 1e308),
    *(float("nan"), float("inf"), -float("inf"), "", "x", "\x00", "\n\x1b[31mforged line", "ü" * 3000),
    *(b"", b"\xff" * 10),
    *([], {}, [[]], [None], {"a": 1}, {"frame": 0}, {"frame": 1}, {"frame": -1}, {"frame": 2**40}),
    {"frame": 1, "dtype": "<f4", "shape": [2**39, 2**39]},
    {"frame": 1, "dtype": "|O", "shape": [1]},
    {"frame": 1, "dtype": "<i4", "shape": [-1]},
    {"frame": 1, "dtype": "<i4", "shape": [0, 2**39, 2**39, 2**39]},
    {"frame": 1, "dtype": "|u1", "shape": []},
)
END = 500
"""Places of a long list that are damaged, from either end."""
TYPES = ("hello", "group", "ack", "tickets", "chunk", "chunk_request", "error", "goodbye", "from_the_future", 7)


def frames_of(message: Wire) -> Frames:
    return [bytes(frame) for frame in encode(message)]


def pack(value: object) -> bytes:
    packed = msgpack.packb(value)
    assert packed is not None
    return packed


def mutate(rng: random.Random, message: Wire) -> Frames:
    """Encode a message with one to three kinds of damage."""
    right = frames_of(message)
    damaged = right
    while damaged in (right, []):
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            damaged = rng.choice(MUTATIONS)(rng, list(damaged))
    return damaged


def change_bytes(rng: random.Random, frames: Frames) -> Frames:
    """Flip bits of a frame (every other time of the header), cut it short, or add to it."""
    index = rng.choice((0, rng.randrange(len(frames)))) if frames else 0
    if not frames or not frames[index]:
        return frames
    damaged = bytearray(frames[index])
    for _ in range(rng.randint(1, 4)):
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
    whole = frames[index]
    frames[index] = rng.choice((bytes(damaged), whole[: rng.randrange(len(whole))], whole + rng.randbytes(9)))
    return frames


def change_frames(rng: random.Random, frames: Frames) -> Frames:
    """Drop, double or reorder frames, or send noise."""
    kind = rng.randrange(4)
    if kind == 0:
        return [rng.randbytes(rng.randint(0, 200)) for _ in range(rng.randint(1, 8))]
    if kind == 1 and len(frames) > 1:
        del frames[rng.randrange(len(frames))]
    elif kind == 2 and frames:
        frames.insert(rng.randint(0, len(frames)), rng.choice(frames))
    else:
        rng.shuffle(frames)
    return frames


def change_header(rng: random.Random, frames: Frames) -> Frames:
    """Change, remove or add one value anywhere in the header's tree; a header that cannot be read stays as it is."""
    try:
        header = msgpack.unpackb(frames[0])
        parent, key = rng.choice(list(places(header)))
        value = rng.choice(TYPES if key == "type" else NASTY)
        kind = rng.randrange(5)
        if kind == 0:
            del parent[key]
        elif kind == 1 and isinstance(parent, dict):
            parent[rng.choice(("extra", "type", "code", "x" * 500))] = value
        elif kind == 1:
            parent.append(value)
        else:
            parent[key] = value
        return [pack(header), *frames[1:]]
    except (ValueError, TypeError, AttributeError, IndexError, OverflowError, msgpack.UnpackException):
        return frames


def places(tree: Any, depth: int = 20) -> Iterator[tuple[Any, Any]]:
    """(Container, key) in the tree, not too far down: it may have been nested. Of a long list, its ends: what
    `enlarge` made has a million equal numbers."""
    items = list(tree.items() if isinstance(tree, dict) else enumerate(tree))
    for key, value in items if len(items) <= 2 * END else items[:END] + items[-END:]:
        yield tree, key
        if isinstance(value, dict | list) and depth:
            yield from places(value, depth - 1)


def nest(rng: random.Random, frames: Frames) -> Frames:
    """Deeply, as maps or as lists; msgpack's own packer would refuse."""
    depth = rng.choice((10, 63, 64, 300, 511, 900, 1000, 1023, 1024, 5000))
    opening = rng.choice((b"\x91", b"\x81\xa1a"))
    key = rng.choice((b"\xa9token_ids", b"\xacticket_ids", b"\xa6reason", b"\xa7columns", b"\xa6answer"))
    name = rng.choice((b"\xa5group", b"\xa5error", b"\xa7tickets", b"\xa3ack"))
    return [b"\x82\xa4type" + name + key + opening * depth + b"\x00", *frames[1:]]


def enlarge(rng: random.Random, frames: Frames) -> Frames:
    """Declared lengths far beyond what follows; many frames, or really much: seldom, since it is slow to send."""
    kind = rng.randrange(20)
    if kind == 0:
        return [*frames, *[b""] * rng.choice((4000, 5000))]
    if kind == 1:
        return [b"\x82\xa4type\xa5group\xa9token_ids" + _numbers(rng.choice((1, 20)))]
    if kind == 2:
        return [*frames, b"\x00" * rng.choice((1 << 20, 5 << 20))]
    return [rng.choice((b"\xdf", b"\xdd", b"\xdb", b"\xc6")) + b"\xff" * 4]


@cache
def _numbers(lists: int) -> bytes:
    return pack([[0] * 60_000] * lists)


def deep_json(rng: random.Random) -> str:
    """JSON of any depth, whole or broken off in the middle."""
    opening, closing = rng.choice((("[", "]"), ('{"a":', "}"), ('[{"b":', "}]")))
    depth = rng.choice((20, 65, 200, 700, 1000, 4096 // len(opening), 20_000))
    return opening * depth + rng.choice(("", "0" + closing * depth))


def nest_text(rng: random.Random, frames: Frames) -> Frames:
    """JSON nested deeply in any text of the header, a turn's `info` more often; one that cannot be read stays."""
    try:
        header = msgpack.unpackb(frames[0])
        texts = [(parent, key) for parent, key in places(header) if isinstance(parent[key], str) and key != "type"]
        if turns := [turn for record in header.get("trajectories", ()) for turn in record["turns"]]:
            texts += [(turn, "info") for turn in turns] * 9
        parent, key = rng.choice(texts)
        parent[key] = deep_json(rng)
        return [pack(header), *frames[1:]]
    except (ValueError, TypeError, AttributeError, IndexError, KeyError, OverflowError, msgpack.UnpackException):
        return frames


MUTATIONS = (*(change_bytes, change_frames) * 3, nest, nest_text, enlarge, *(change_header,) * 6)


def wrong_group(rng: random.Random, ticket_id: int, version: int, server_id: str) -> Group:
    """Well-formed, and wrong in one way that only the ticket can tell."""
    right = content.group(ticket_id, version, server_id)

    def with_one(name: str, *values: float) -> dict[str, Any]:
        column = getattr(right, name).copy()
        column[rng.randrange(column.size)] = rng.choice(values)
        return {name: column}

    unscored = right.trajectories[0].model_copy(update={"reward": None})
    changes: list[dict[str, Any]] = [
        with_one("logprobs", float("nan"), 1.0, float("inf"), -float("inf")),
        with_one("token_ids", content.BANNED, content.VOCABULARY, -1, 2**31 - 1),
        with_one("prompt_ids", -1, content.VOCABULARY),
        with_one("source", 1, 2, 7),
        {"prompt_ids": right.prompt_ids[:-1]},
        {"versions": right.versions + rng.choice((1, 1000, -version - 1))},
        {"image_grids": right.image_grids + 1},
        {"image_hashes": ("0" * 64,)},
        {"trajectories": (unscored, *right.trajectories[1:])},
    ]
    return right.model_copy(update=rng.choice(changes))
