"""The work of each rank in a step: whether one has more to do than the others, or less memory left."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from learner.ranks.group import Ranks
from learner.training.packing import MicroBatch


@dataclass
class RankWork:
    """Work of this rank since the last report."""

    busy_s: float = 0.0
    tokens: int = 0

    def of(self, micro_batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        """Count the time until the next one is asked for, and the tokens, of those that are not repeated idly."""
        for micro_batch in micro_batches:
            began = time.monotonic()
            yield micro_batch
            if not micro_batch.is_idle:
                self.busy_s += time.monotonic() - began
                self.tokens += micro_batch.num_tokens

    def report(self, ranks: Ranks, device: torch.device) -> dict[str, float]:
        """Every rank's, by its number, and start anew. A collective; of a single rank nothing is reported."""
        if ranks.size == 1:
            return {}
        names = ("rank_busy_s", "rank_tokens", "rank_peak_gib")
        table = ranks.gather([self.busy_s, self.tokens, _peak_bytes(device) / 2**30])
        self.busy_s, self.tokens = 0.0, 0
        return {f"{name}/{rank}": row[i] for rank, row in enumerate(table) for i, name in enumerate(names)}


def _peak_bytes(device: torch.device) -> int:
    """Most bytes of tensors on a GPU since the last report; on a CPU most resident bytes of the process so far."""
    if device.type != "cuda":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return peak
