"""The tables of protocol/README.md agree with messages/ and errors.py."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

from learner.network.sockets import CHUNK_LIMITS
from protocol import codec, download, messages
from protocol.codec import ALL_MODELS, Limits
from protocol.errors import ErrorCode
from protocol.handshake import PeerLimits
from protocol.sockets import CHUNK_QUEUES, CONTROL_QUEUES, TURN_MESSAGES, TURN_S

ROOT = Path(__file__).parents[3]
README = (ROOT / "protocol" / "README.md").read_text()

TO_LEARNER, TO_SERVER = "server → learner", "learner → server"
ROUTES: list[tuple[Any, str, str]] = [
    (messages.ControlFromServer, TO_LEARNER, "control"),
    (messages.ControlFromLearner, TO_SERVER, "control"),
    (messages.WeightsFromServer, TO_LEARNER, "weights"),
    (messages.WeightsFromLearner, TO_SERVER, "weights"),
]


def table(heading: str) -> list[list[str]]:
    """Rows below the header line that starts with `| heading |`."""
    lines = README.splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith(f"| {heading} |"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_message_table():
    found = {row[0].strip("`"): (row[1].strip("`"), row[2], row[3], quoted(row[4])) for row in table("message")}
    expected = {}
    for tag, model in ALL_MODELS.items():
        routes = [(way, place) for union, way, place in ROUTES if model in (get_args(union) or (union,))]
        ways = list(dict.fromkeys(way for way, _ in routes))
        places = ", ".join(dict.fromkeys(place for _, place in routes))
        if places:
            expected[model.__name__] = (tag, ways[0] if len(ways) == 1 else "both", places, fields_of(model))
    assert found == expected
    assert len(table("message")) == len(expected)


def fields_of(model: type[messages.Wire]) -> list[str]:
    return [name for name in model.model_fields if name != "type"]


def test_parts_table():
    found = {row[0].strip("`"): quoted(row[1]) for row in table("part")}
    parts = {
        name: list(model.model_fields)
        for name, model in vars(messages).items()
        if isinstance(model, type) and issubclass(model, messages.Wire) and model is not messages.Wire
    }
    assert found == {n: fields for n, fields in parts.items() if getattr(messages, n) not in ALL_MODELS.values()}


def test_error_table():
    rows = table("code")
    assert [row[0].strip("`") for row in rows] == [code.value for code in ErrorCode]
    assert all(row[1] and row[2] for row in rows)


def test_limits_table():
    defaults = [row[1] for row in table("limit")]
    limits, peers = Limits(), PeerLimits()
    assert defaults == [
        f"{limits.max_message_bytes >> 20} MiB",
        f"{limits.max_header_bytes >> 20} MiB",
        str(limits.max_frames),
        f"{codec.MAX_ELEMENTS:,}",
        str(codec.MAX_DEPTH),
        f"{download.MAX_CHUNK_BYTES >> 20} MiB ({download.CHUNK_BYTES >> 20} MiB is asked for)",
        f"{CONTROL_QUEUES.send}, {CHUNK_QUEUES.send}",
        str(CONTROL_QUEUES.receive),
        f"{TURN_MESSAGES}, or {TURN_S} s",
        str(peers.bad_messages),
        f"{peers.messages:,}, {CHUNK_LIMITS.messages:,}",
    ]
    assert CONTROL_QUEUES.receive == CHUNK_QUEUES.receive
    assert peers.interval_s == CHUNK_LIMITS.interval_s == 10
    assert peers.mute_s == CHUNK_LIMITS.mute_s == 60
    assert f"for {peers.mute_s:g} s whatever it sends is dropped" in README


def test_diagram_uses_real_message_types():
    diagrams = "".join(part.split("```")[0] for part in README.split("```mermaid")[1:])
    used = set(re.findall(r"->>[LSP]: (\w+)", diagrams)) - {"map", "verify", "generate"}
    assert used == set(ALL_MODELS) - {"error"}
