"""The staleness bound at consumption: which groups are due, and whether their tokens are within it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from asyncrl.config.service_sections import OnStale
from asyncrl.errors import BadStateError
from learner.groups.ticket import ReceivedGroup
from protocol.messages import TokenSource


def crowded_deadline(due: Iterable[int], version: int, per_step: int) -> int | None:
    """First deadline with more groups due by then than the steps after `version` can take; None if all fit."""
    total = 0
    for deadline, count in sorted(Counter(due).items()):
        total += count
        if total > max(0, deadline - version) * per_step:
            return deadline
    return None


def has_fresh_tokens(item: ReceivedGroup, version: int, *, all_of_them: bool) -> bool:
    """True if all (or any) sampled tokens are within the ticket's bound at `version`."""
    fresh = version - item.group.versions[item.group.is_sampled] <= item.slot.bound
    return bool(np.all(fresh) if all_of_them else np.any(fresh) or not fresh.size)


def within_bound(item: ReceivedGroup, version: int, on_stale: OnStale) -> ReceivedGroup:
    """Check the bound at consumption. Under `mask`, sampled tokens over the bound become context, as observations are.
    Raises BadStateError where a token is over the bound under another rule."""
    if version - item.oldest_version <= item.slot.bound:
        return item
    if on_stale != "mask":
        raise BadStateError(
            f"ticket {item.ticket.ticket_id} has a token of version {item.oldest_version} at version {version}: over "
            f"the staleness bound {item.slot.bound}. Admission should have prevented it: please report this run's logs"
        )
    is_old = item.group.is_sampled & (version - item.group.versions > item.slot.bound)
    source = np.where(is_old, TokenSource.OBSERVATION, item.group.source).astype(np.uint8)
    return replace(item, group=item.group.model_copy(update={"source": source}))
