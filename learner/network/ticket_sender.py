"""Tickets on their way out: written a slice at a time, issued together, shared among the servers."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from asyncrl.journal.writer import TicketSlot
from learner.network.blob_traffic import BlobTraffic
from learner.network.servers import Servers
from learner.network.sharing import share_tickets
from learner.tickets.ledger import TicketLedger
from learner.tickets.ticket import PreparedTicket
from learner.tickets.ticket_size import check_ticket_size, first_that_fit
from protocol.codec import Limits
from protocol.faults import crash_point
from protocol.messages import Tickets

SLICE_S = 0.2
"""Longest time that writing tickets takes at a stretch."""


@dataclass
class _Preparation:
    """Tickets of one order: how to make them, those still to be made, and those ready."""

    prepare: Callable[[], Iterable[PreparedTicket]]
    items: Iterator[PreparedTicket] | None = None
    done: list[PreparedTicket] = field(default_factory=list)


class TicketSender:
    def __init__(
        self,
        connections: Servers,
        ledger: TicketLedger,
        write_ticket: Callable[[TicketSlot], PreparedTicket],
        limits: Limits,
    ):
        self.admitted: int | None = None
        """Training tickets go out as far as the ledger admits them before this version; None: not yet."""
        self.blobs = BlobTraffic()
        self._connections = connections
        self._ledger = ledger
        self._write_ticket = write_ticket
        self._limits = limits
        self._preparing: deque[_Preparation] = deque()

    @property
    def is_busy(self) -> bool:
        return bool(self._preparing)

    def prepare(self, tickets: Callable[[], Iterable[PreparedTicket]]) -> None:
        """Issue them all at once when the last is written."""
        self._preparing.append(_Preparation(tickets))

    def work(self) -> None:
        """One turn."""
        self._admit()
        self._write_some()
        self._send_waiting()

    def _admit(self) -> None:
        """All tickets that may go out now, together. One preparation at a time: it decides what is admissible next."""
        if self.admitted is None or self._preparing:
            return
        slots = self._ledger.admissible(self.admitted)
        if slots:
            self.prepare(lambda: (self._write_ticket(slot) for slot in slots))

    def _write_some(self) -> None:
        """A slice of the oldest preparation: reading and encoding many images must not silence the heartbeat."""
        deadline = time.monotonic() + SLICE_S
        while self._preparing and time.monotonic() < deadline:
            preparation = self._preparing[0]
            if preparation.items is None:
                preparation.items = iter(preparation.prepare())
            item = next(preparation.items, None)
            if item is None:
                self._ledger.issue(preparation.done)
                self._preparing.popleft()
            else:
                check_ticket_size(item, self._limits)
                preparation.done.append(item)

    def _send_waiting(self) -> None:
        """Each server gets its share of the waiting tickets in one message, admitted together.

        Tickets of before a restart wait until the learner has made its steps again and published: a server could only
        wait for those weights, and would give up.
        """
        waiting = [item for item in self._ledger.out.waiting() if self.admitted is not None or not item.is_training]
        if not waiting:
            return
        servers = self._connections.aligned
        shares = share_tickets(
            waiting,
            held={server_id: self._ledger.out.held_by(server_id) for server_id in servers},
            most={server_id: server.hello.max_groups for server_id, server in servers.items()},
            may_try=lambda ticket_id, server_id: self._ledger.out.may_try(ticket_id, server_id, servers),
        )
        alone = len(servers) == 1
        for server_id, share in shares.items():
            chosen = first_that_fit(share, self._limits)
            self._send(server_id, chosen, self._ledger.batch_mates(chosen) if alone else [])

    def _send(self, server_id: str, chosen: Sequence[PreparedTicket], mates: Sequence[PreparedTicket]) -> None:
        sent = sorted((*chosen, *mates), key=lambda item: item.ticket.ticket_id) if mates else chosen
        if mates and len(first_that_fit(sent, self._limits)) < len(sent):  # then they were not in one message before
            sent = chosen
        blobs = {digest: memoryview(data) for item in sent for digest, data in item.blobs.items()}
        if self._connections.send(server_id, Tickets(tickets=tuple(item.ticket for item in sent), blobs=blobs)):
            self.blobs.count(sent)
            self._ledger.out.assign([item.ticket.ticket_id for item in chosen], server_id)
            crash_point("tickets.sent")
