"""What a ticket weighs in a message: its dataset columns travel in the header, its images as frames."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from asyncrl.errors import UserError
from protocol.codec import MIB, Limits, encode
from protocol.errors import ProtocolError
from protocol.messages import Ticket

if TYPE_CHECKING:
    from learner.tickets.ticket import PreparedTicket

_ENVELOPE_BYTES = 256
"""Of a header around its tickets."""
_BLOB_ENTRY_BYTES = 128
"""Of a header for each image: its hash and where its frame is."""


def header_bytes(ticket: Ticket, num_blobs: int) -> int:
    """At most this much of a message's header is the ticket's. Raises ProtocolError for what cannot travel."""
    return len(encode(ticket)[0]) + num_blobs * _BLOB_ENTRY_BYTES


def first_that_fit(tickets: Sequence[PreparedTicket], limits: Limits) -> Sequence[PreparedTicket]:
    """As many, from the first, as one message may carry; one at least, see `check_ticket_size`."""
    frames, size, header = 1, 0, _ENVELOPE_BYTES
    for count, item in enumerate(tickets):
        frames += len(item.blobs)
        size += item.blob_bytes + item.header_bytes
        header += item.header_bytes
        if count and not _fits(frames, size, header, limits, share=2):
            return tickets[:count]
    return tickets


def check_ticket_size(item: PreparedTicket, limits: Limits) -> None:
    """Raises UserError naming the row when it fits into no message."""
    row = item.ticket.prompt.row_id
    try:
        header = _ENVELOPE_BYTES + item.header_bytes
    except ProtocolError as problem:
        raise UserError(f"row {row} cannot be sent to a rollout server: {problem.reason}") from problem
    if _fits(1 + len(item.blobs), item.blob_bytes + header, header, limits, share=1):
        return
    raise UserError(
        f"row {row} is too large to be sent to a rollout server: {len(item.blobs)} images, "
        f"{item.blob_bytes / MIB:.1f} MiB, and {header / MIB:.1f} MiB of text and columns; a message takes "
        f"{limits.max_frames - 1:,} images, {limits.max_message_bytes / MIB:.0f} MiB (network.max_message_mib), and "
        f"{limits.max_header_bytes / MIB:.0f} MiB of text and columns. Leave out what the reward does not need"
    )


def _fits(frames: int, size: int, header: int, limits: Limits, *, share: int) -> bool:
    """Several tickets use a share of a message's bytes, so that none is in the making for long."""
    return (
        frames <= limits.max_frames and size <= limits.max_message_bytes // share and header <= limits.max_header_bytes
    )
