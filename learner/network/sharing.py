"""Which server gets which of the waiting tickets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice

from learner.tickets.ticket import PreparedTicket


def share_tickets(
    waiting: Sequence[PreparedTicket],
    held: Mapping[str, int],
    most: Mapping[str, int],
    may_try: Callable[[int, str], bool],
) -> dict[str, list[PreparedTicket]]:
    """Tickets per server, the least loaded first; no server gets more than it is willing to hold.

    `held` and `most` count groups by server id; `may_try(ticket_id, server_id)` may exclude a pair. What nobody can
    take is in no share.
    """
    left = list(waiting)
    shares: dict[str, list[PreparedTicket]] = {}
    servers = sorted(held, key=lambda server_id: held[server_id])
    for place, server_id in enumerate(servers):
        share = min(most[server_id] - held[server_id], -(-len(left) // (len(servers) - place)))
        suitable = (item for item in left if may_try(item.ticket.ticket_id, server_id))
        chosen = list(islice(suitable, max(0, share)))
        gone = {item.ticket.ticket_id for item in chosen}
        left = [item for item in left if item.ticket.ticket_id not in gone]
        if chosen:
            shares[server_id] = chosen
    return shares
