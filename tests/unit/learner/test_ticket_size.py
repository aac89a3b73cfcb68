"""Tickets are put into messages that may be sent, whatever their columns and images weigh."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.errors import UserError
from asyncrl.journal.writer import TicketSlot
from asyncrl.models.processing import PromptFacts
from learner.tickets.ticket import PreparedTicket, check_ticket_size, first_that_fit
from protocol.codec import Limits, encode
from protocol.messages import ChatMessage, ImagePart, Prompt, Sampling, TextPart, Ticket, TicketKind, Tickets

LIMITS = Limits(max_message_bytes=64_000, max_header_bytes=8_000, max_frames=12)


def make(number: int, column: Any = None, images: tuple[int, ...] = ()) -> PreparedTicket:
    blobs = {f"{number:032x}{i:032x}": bytes(size) for i, size in enumerate(images)}
    content = (TextPart(text="How many?"), *(ImagePart() for _ in images))
    prompt = Prompt(
        row_id=f"rows:{number}",
        messages=(ChatMessage(role="user", content=content),),
        image_hashes=tuple(blobs),
        columns={"solution": column},
    )
    ticket = Ticket(
        ticket_id=number,
        kind=TicketKind.TRAIN,
        prompt=prompt,
        group_size=8,
        seed=number,
        min_version=0,
        sampling=Sampling(max_new_tokens=4, stop_token_ids=(0,)),
    )
    facts = PromptFacts(np.zeros(1, np.int32), np.zeros((len(images), 3), np.int32), tuple(blobs))
    return PreparedTicket(ticket, blobs, TicketSlot(number, number, 0, 0), facts)


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
            check_ticket_size(chosen[0], LIMITS)
        except UserError:
            assert len(chosen) == 1
        else:
            encode(message(chosen), LIMITS)
        waiting = waiting[len(chosen) :]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (make(7, "x" * 9_000), "row rows:7 is too large .* 0 images, 0.0 MiB, and 0.0 MiB of text and columns"),
        (make(7, None, (70_000,)), "row rows:7 is too large .* 1 images, 0.1 MiB"),
        (make(7, None, (1,) * 12), "row rows:7 is too large .* a message takes 11 images"),
        (make(7, {"a": object()}), "row rows:7 cannot be sent to a rollout server: Ticket holds a value"),
    ],
)
def test_a_row_that_fits_into_no_message_is_named(row: PreparedTicket, says: str) -> None:
    with pytest.raises(UserError, match=says):
        check_ticket_size(row, LIMITS)
