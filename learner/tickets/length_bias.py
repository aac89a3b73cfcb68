"""The length-bias meter: does what is trained on differ in length from what was sampled?

Long completions are the ones that become stale. Dropping them, or masking their early tokens, quietly teaches a
policy to be short. The meter is `mean(trained) / mean(trained or dropped, as sampled) - 1` in tokens per trajectory:
0 without bias, negative when long trajectories are lost. Groups that wait in the buffer are not in it: their fate is
open, and they are short, because the short ones of each version arrive first. With them a run that loses nothing
would read above 0 for as long as it lasts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from learner.groups.ticket import ReceivedGroup


class LengthBias:
    """Sums over the whole run, kept among the ledger's counters so that they survive a restart."""

    def __init__(self, counters: Mapping[str, int]):
        self._counters = counters

    def trained(self, sampled: Sequence[ReceivedGroup], trained: Sequence[ReceivedGroup]) -> dict[str, int]:
        """Increments of the counters for groups as they were sampled, and as they are trained on after masking."""
        rows, tokens = _size(sampled)
        return {"rows_trained": rows, "tokens_sampled": tokens, "tokens_trained": _size(trained)[1]}

    def dropped(self, items: Iterable[ReceivedGroup]) -> dict[str, int]:
        """Increments of the counters for groups that are dropped."""
        rows, tokens = _size(items)
        return {"rows_dropped": rows, "tokens_dropped": tokens}

    def report(self, buffered: Iterable[ReceivedGroup]) -> dict[str, float]:
        """Mean tokens per trajectory of trained, dropped and buffered, and the meter; only what is defined."""
        c = self._counters
        rows_here, tokens_here = _size(buffered)
        report: dict[str, float] = {}
        for name, tokens, rows in (
            ("trained", c["tokens_trained"], c["rows_trained"]),
            ("dropped", c["tokens_dropped"], c["rows_dropped"]),
            ("buffered", tokens_here, rows_here),
        ):
            if rows:
                report[f"length/{name}"] = tokens / rows
        if c["rows_trained"]:
            rows = c["rows_trained"] + c["rows_dropped"]
            tokens = c["tokens_sampled"] + c["tokens_dropped"]
            report["length_bias"] = report["length/trained"] * rows / max(tokens, 1) - 1
        return report


def _size(items: Iterable[ReceivedGroup]) -> tuple[int, int]:
    """Trajectories and sampled tokens that are in the loss, greedy ones left out."""
    rows = tokens = 0
    for item in items:
        rows += int(np.count_nonzero(~item.provenance.is_baseline))
        tokens += int(np.count_nonzero(item.provenance.is_drawn))
    return rows, tokens
