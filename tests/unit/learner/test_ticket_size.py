"""Tickets are put into messages that may be sent, whatever their columns and images weigh."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.journal.writer import TicketSlot
from learner.groups.ticket import PreparedTicket, first_that_fit
from protocol.codec import Limits, encode
from protocol.errors import ProtocolError
from protocol.messages import ChatMessage, ImagePart, Prompt, TextPart, Tickets
from tests.unit.learner.test_tickets import prepared

LIMITS = Limits(max_message_bytes=64_000, max_header_bytes=8_000, max_frames=12)


def make(number: int, column: Any = None, images: tuple[int, ...] = ()) -> PreparedTicket:
    blobs = {f"{number:032x}{i:032x}": bytes(size) for i, size in enumerate(images)}
    parts = (TextPart(text="How many?"), *(ImagePart() for _ in images))
    item = prepared(TicketSlot(number, number, 0, 0))
    prompt = Prompt(
        row_id=f"rows:{number}",
        messages=(ChatMessage(role="user", content=parts),),
        image_hashes=tuple(blobs),
        columns={"solution": column},
    )
    return replace(item, ticket=item.ticket.model_copy(update={"prompt": prompt}), blobs=blobs)


def message(tickets: Any) -> Tickets:
    blobs = {digest: memoryview(data) for item in tickets for digest, data in item.blobs.items()}
    return Tickets(tickets=tuple(item.ticket for item in tickets), blobs=blobs)


COLUMNS = st.integers(0, 6_000).map(lambda n: "\N{EURO SIGN}" * (n // 3)) | st.integers(0, 700).map(lambda n: [1.5] * n)
IMAGES = st.lists(st.integers(1, 20_000), max_size=4).map(tuple)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(COLUMNS, IMAGES), min_size=1, max_size=12))
def test_what_is_said_to_fit_can_be_sent(rows: list[tuple[Any, tuple[int, ...]]]) -> None:
    waiting = [make(number, column, images) for number, (column, images) in enumerate(rows)]
    while waiting:
        chosen = first_that_fit(waiting, LIMITS)
        assert chosen
        try:
            encode(message(chosen), LIMITS)
        except ProtocolError:
            assert len(chosen) == 1
        waiting = waiting[len(chosen) :]
