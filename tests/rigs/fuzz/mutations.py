"""Seeded damage to valid messages: to their bytes, their frames, the tree of their header, and their meaning."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgpack

from protocol.codec import encode
from protocol.messages import Group, Wire
from tests.rigs.fuzz import content

Frames = list[bytes]
NASTY: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 2**31 - 1, 2**31, 2**53, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), 0.5, 1e308),
    *(
        float("nan"),
        float("inf"),
        -float("inf"),
        "",
        "x",
        "\x00",
        "\n\x1b[31mforged line",
        "ü" * 3000,
        b"",
        b"\xff" * 10,
    ),
    *([], {}, [[]], [None], {"a": 1}, {"frame": 0}, {"frame": 1}, {"frame": -1}, {"frame": 2**40}),
    {"frame": 1, "dtype": "<f4", "shape": [2**39, 2**39]},
    {"frame": 1, "dtype": "|O", "shape": [1]},
    {"frame": 1, "dtype": "<i4", "shape": [-1]},
    {"frame": 1, "dtype": "<i4", "shape": [0, 2**39, 2**39, 2**39]},
    {"frame": 1, "dtype": "|u1", "shape": []},
)


def frames_of(message: Wire) -> Frames:
    return [bytes(frame) for frame in encode(message)]


def mutate(rng: random.Random, frames: Frames) -> Frames:
    """One to three kinds of damage; what comes out differs from `frames`."""
    damaged = frames
    while damaged in (frames, []):
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            damaged = rng.choice(MUTATIONS)(rng, list(damaged))
    return damaged


def flip_bits(rng: random.Random, frames: Frames) -> Frames:
    """In the header every other time."""
    index = rng.choice((0, rng.randrange(len(frames)))) if frames else 0
    if frames and frames[index]:
        damaged = bytearray(frames[index])
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        frames[index] = bytes(damaged)
    return frames


def resize(rng: random.Random, frames: Frames) -> Frames:
    """Cut a frame short, or add bytes to it."""
    if frames:
        index = rng.randrange(len(frames))
        longer = frames[index] + rng.randbytes(rng.randint(1, 64))
        frames[index] = rng.choice((longer, frames[index][: rng.randint(0, len(frames[index]))]))
    return frames


def rearrange(rng: random.Random, frames: Frames) -> Frames:
    """Drop, double or reorder frames."""
    kind = rng.randrange(3)
    if kind == 0 and len(frames) > 1:
        del frames[rng.randrange(len(frames))]
    elif kind == 1 and frames:
        frames.insert(rng.randint(0, len(frames)), rng.choice(frames))
    else:
        rng.shuffle(frames)
    return frames


def noise(rng: random.Random, _frames: Frames) -> Frames:
    return [rng.randbytes(rng.randint(0, 200)) for _ in range(rng.randint(1, 8))]


def change_header(rng: random.Random, frames: Frames) -> Frames:
    """Change, remove or add one value anywhere in the header's tree."""

    def change(header: dict[str, Any]) -> dict[str, Any]:
        if not header:
            return header
        parent, key = rng.choice(list(_places(header)))
        kind = rng.randrange(5)
        if kind == 0:
            del parent[key]
        elif kind == 1 and isinstance(parent, dict):
            parent[rng.choice(("extra", "type", "code", "x" * 500))] = rng.choice(NASTY)
        elif kind == 1:
            parent.append(rng.choice(NASTY))
        else:
            parent[key] = rng.choice(NASTY)
        return header

    return _with_header(frames, change)


def nest(rng: random.Random, frames: Frames) -> Frames:
    """Deeply, as maps or as lists; msgpack's own packer would refuse."""
    depth = rng.choice((10, 300, 511, 900, 1000, 1023, 1024, 5000))
    opening = rng.choice((b"\x91", b"\x81\xa1a"))
    key = rng.choice((b"\xa9token_ids", b"\xacticket_ids", b"\xa6reason", b"\xa7columns"))
    name = rng.choice((b"\xa5group", b"\xa5error", b"\xa7tickets", b"\xa3ack"))
    return [b"\x82\xa4type" + name + key + opening * depth + b"\x00", *frames[1:]]


def huge(rng: random.Random, frames: Frames) -> Frames:
    """Declared lengths far beyond what follows, many frames, or really much: seldom, since it is slow to send."""
    kind = rng.randrange(20)
    if kind == 0:
        return [*frames, *[b""] * rng.choice((4000, 5000))]
    if kind == 1:
        return [b"\x82\xa4type\xa5group\xa9token_ids" + msgpack.packb([[0] * 60_000] * rng.choice((1, 20)))]
    if kind == 2:
        return [*frames, b"\x00" * rng.choice((1 << 20, 5 << 20))]
    return [
        rng.choice((b"\xdf\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"))
    ]


def retype(rng: random.Random, frames: Frames) -> Frames:
    """Another message type, or another protocol."""
    types = ("hello", "group", "ack", "tickets", "chunk", "chunk_request", "error", "goodbye", "from_the_future", 7)
    majors = {"protocol_major": rng.choice((0, 9, "1", None, 2**63)), "protocol_minor": rng.choice((1, 99, -1))}
    return _with_header(frames, lambda header: header | rng.choice(({"type": rng.choice(types)}, majors)))


MUTATIONS: tuple[Callable[[random.Random, Frames], Frames], ...] = (
    *(flip_bits, flip_bits, resize, resize, rearrange, rearrange, noise, nest, huge, retype),
    *(change_header,) * 5,
)


def _with_header(frames: Frames, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Frames:
    """Unchanged if the header cannot be read any more."""
    try:
        header = msgpack.unpackb(frames[0])
        if not isinstance(header, dict):
            return frames
        return [msgpack.packb(change(header)), *frames[1:]]
    except (ValueError, TypeError, IndexError, OverflowError, msgpack.UnpackException):
        return frames


def _places(tree: Any, depth: int = 20) -> Any:
    """Every (container, key) of the tree, not too far down: it may have been nested."""
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in list(pairs):
        yield tree, key
        if isinstance(value, dict | list) and depth:
            yield from _places(value, depth - 1)


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
        with_one("loss_mask", 7),
        {"prompt_ids": right.prompt_ids[:-1]},
        {"versions": right.versions + rng.choice((1, 1000, -version - 1))},
        {"image_grids": right.image_grids + 1},
        {"image_hashes": ("0" * 64,)},
        {"trajectories": (unscored, *right.trajectories[1:])},
    ]
    return right.model_copy(update=rng.choice(changes))
