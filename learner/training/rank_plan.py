"""Plan of an update over ranks: each rank gets the same number of micro-batches, of about the same cost.

All ranks make the same plan of the same batch. They compute layer by layer together, so that each takes part in every
micro-batch of the others. A rank without work repeats a part with a loss of 0. A rank without images beside a rank
with some adds the smallest prompt that has images, and trains none of its tokens.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import torch

from asyncrl.processing.encoded_prompt import EncodedPrompt
from learner.ranks.group import Ranks
from learner.training.packing import MicroBatch, PackedTrajectory, TrainGroup, plan_micro_batches, split_group

BALANCED = 1.1
"""Tokens of the heaviest micro-batch, as a multiple of the mean, below which groups are not split for balance."""


@dataclass(frozen=True)
class Share:
    """One rank's micro-batch."""

    groups: tuple[TrainGroup, ...]
    is_idle: bool = False
    """True for a repeated micro-batch: its loss is 0, and it is not reported."""


def plan_shares(groups: Sequence[TrainGroup], budget: int, size: int) -> list[list[Share]]:
    """Shares of each micro-batch, one for each of `size` ranks.

    Parts are given out from the largest on, always to the micro-batch with the fewest tokens (LPT, Graham 1969). Where
    that leaves one over the budget, each rank gets one more; a part over the budget has one for itself.
    """
    if size == 1:
        return [[Share(tuple(part))] for part in plan_micro_batches(groups, budget)]
    if not groups:
        return []
    filled = plan_micro_batches(groups, budget)
    rounds = -(-len(filled) // size)
    while True:
        bins = _distribute(groups, budget, rounds * size)
        if all(_tokens(part) <= budget or len(part) == 1 for part in bins):
            break
        rounds += 1
    bins.sort(key=_tokens, reverse=True)  # micro-batches of one round are of similar cost
    smallest = min((part for part in bins if part), key=_tokens)
    shares = [Share(tuple(part)) if part else Share(tuple(smallest), is_idle=True) for part in bins]
    rounds_of = [shares[first : first + size] for first in range(0, len(shares), size)]
    return [_with_same_media(each, groups) for each in rounds_of]


def _distribute(groups: Sequence[TrainGroup], budget: int, count: int) -> list[list[TrainGroup]]:
    """`count` micro-batches of parts of the groups.

    The largest part of the heaviest one is split, its prompt repeated, as long as all wait less for the heaviest then.
    """
    parts = [part for group in groups for part in split_group(group, budget)]
    best = _fill(parts, count)
    while True:
        heaviest = max(best, key=_tokens)
        wide = [part for part in heaviest if len(part.completions) > 1]
        if not wide or _tokens(heaviest) * count <= BALANCED * sum(map(_tokens, best)):
            return best
        largest = max(wide, key=lambda part: part.num_tokens)
        parts = [piece for part in parts for piece in (_halves(part) if part is largest else [part])]
        found = _fill(parts, count)
        if _tokens(max(found, key=_tokens)) >= _tokens(heaviest):
            return best
        best = found


def _fill(parts: Sequence[TrainGroup], count: int) -> list[list[TrainGroup]]:
    """The largest part first, always to the micro-batch with the fewest tokens."""
    bins: list[list[TrainGroup]] = [[] for _ in range(count)]
    load = [0] * count
    for part in sorted(parts, key=lambda part: part.num_tokens, reverse=True):
        lightest = min(range(count), key=lambda i: load[i])
        bins[lightest].append(part)
        load[lightest] += part.num_tokens
    return bins


def _halves(group: TrainGroup) -> list[TrainGroup]:
    middle = len(group.completions) // 2
    return [replace(group, completions=half) for half in (group.completions[:middle], group.completions[middle:])]


def _tokens(groups: Sequence[TrainGroup]) -> int:
    return sum(group.num_tokens for group in groups)


def _with_same_media(shares: Sequence[Share], groups: Sequence[TrainGroup]) -> list[Share]:
    """Shares that all have images if one has, and all videos if one has."""
    made = list(shares)
    for shown in (_images, _videos):
        if not any(_shows(group, shown) for share in made for group in share.groups):
            continue
        candidates = (_untrained(group, shown) for group in groups if _shows(group, shown))
        companion = min(candidates, key=lambda group: group.num_tokens)
        for i, share in enumerate(made):
            if not any(_shows(group, shown) for group in share.groups):
                made[i] = replace(share, groups=(*share.groups, companion))
    return made


def _images(piece: EncodedPrompt) -> int:
    return len(piece.image_grids)


def _videos(piece: EncodedPrompt) -> int:
    return len(piece.video_grids)


def _shows(group: TrainGroup, shown: Callable[[EncodedPrompt], int]) -> bool:
    return shown(group.prompt) > 0 or any(map(shown, chain.from_iterable(c.observed for c in group.completions)))


def _untrained(group: TrainGroup, shown: Callable[[EncodedPrompt], int]) -> TrainGroup:
    """The group's prompt, and one token that is neither an input nor in the loss; or the completion that shows what the
    prompt does not, of which no token is in the loss."""
    if shown(group.prompt):
        first = group.completions[0]
        ids = first.token_ids[:1]
        traces = {name: rows[:1] for name, rows in first.traces.items()}
        return replace(group, completions=(PackedTrajectory(first.row, ids, np.zeros_like(ids), traces=traces),))
    showing = min((c for c in group.completions if any(map(shown, c.observed))), key=lambda c: len(c.token_ids))
    return replace(group, completions=(replace(showing, is_trained=np.zeros_like(showing.is_trained)),))


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
