"""Images on their way out: the bytes of each travel once per message, whatever refers to them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from learner.tickets.ticket import PreparedTicket


@dataclass
class BlobTraffic:
    """Written by the exchange thread; others may read."""

    sent_bytes: int = 0
    hits: int = 0
    """Images of trajectories that found their bytes in the message already."""
    saved_bytes: int = 0
    """What these would have taken."""

    def count(self, message: Sequence[PreparedTicket]) -> None:
        """These tickets went out together."""
        uses: Counter[str] = Counter()
        sizes: dict[str, int] = {}
        for item in message:
            sizes |= {digest: len(data) for digest, data in item.blobs.items()}
            for digest in item.ticket.prompt.media_hashes:
                uses[digest] += item.ticket.group_size
        self.sent_bytes += sum(sizes.values())
        self.hits += sum(count - 1 for count in uses.values())
        self.saved_bytes += sum((count - 1) * sizes[digest] for digest, count in uses.items())
