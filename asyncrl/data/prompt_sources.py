"""Data order, and the prompt source: positions of the order that are visited, where not all of them are.

A method of the kind `prompt_source` names a subclass, which is made as `(settings, order, seed, *, accuracy, per_step,
end)`: the method's settings, the data order, the run's seed, the reward's component that is its accuracy, and the
groups of a step. A position that it passes over is not issued, and the next one is looked at. Epochs stay what they
are, and an epoch always ends. Random numbers belong to positions, and all else that a source knows is its state, which
the ledger journals in the transaction of the group that it was learnt from. So a run that resumes chooses as it would
have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from asyncrl.errors import UserError


class DataOrder:
    """Position 0, 1, 2, ... -> row. Every epoch of `num_rows` positions visits each row once."""

    def __init__(self, num_rows: int, seed: int, shuffle: bool = True, sort_by: Sequence[float] | None = None) -> None:
        """`sort_by`: a number of each row. Every epoch then goes from the smallest to the largest, equal ones in the
        epoch's permutation."""
        if num_rows < 1:
            raise UserError("there are no training rows: check data.train_files and data.max_train_rows")
        self.num_rows = num_rows
        self._seed = seed
        self._shuffle = shuffle
        self._sort_by = None if sort_by is None else np.asarray(sort_by, np.float64)
        self._permutations: dict[int, np.ndarray] = {}

    def row_at(self, position: int) -> int:
        """The row at a position; depends on nothing but the arguments of this object and the position."""
        if position < 0:
            raise ValueError(f"position is {position}: expected 0 or more")
        epoch, place = divmod(position, self.num_rows)
        is_as_it_is = not self._shuffle and self._sort_by is None
        return place if is_as_it_is else int(self._permutation(epoch)[place])

    def _permutation(self, epoch: int) -> np.ndarray:
        """[num_rows] of one epoch; the last two are kept, since a step may span both."""
        if epoch not in self._permutations:
            if len(self._permutations) == 2:
                del self._permutations[min(self._permutations)]
            rows = self._shuffled(epoch) if self._shuffle else np.arange(self.num_rows)
            if self._sort_by is not None:
                rows = rows[np.argsort(self._sort_by[rows], kind="stable")]
            self._permutations[epoch] = rows
        return self._permutations[epoch]

    def _shuffled(self, epoch: int) -> np.ndarray:
        """[num_rows] in random order."""
        # Raw bits are the part of NumPy's generators whose stream never changes between releases
        # (NEP 19), so a run resumes in the same order after an upgrade.
        bits = np.random.PCG64(np.random.SeedSequence([self._seed, epoch])).random_raw(self.num_rows)
        return np.argsort(bits, kind="stable")


class PromptSource:
    """Every position up to the end of the run, one after the other."""

    learns = False
    """Whether `observe` changes anything."""
    component = ""
    """Component of the reward that `observe` gets; empty means the reward itself."""

    def __init__(self, end: int | None = None):
        """`end`: number of positions; None: without end."""
        self.end = end

    def next(self, n: int, start: int) -> list[int]:
        """The first `n` positions from `start` on to be visited; fewer where the data ends. Changes nothing."""
        last = start + max(0, n)
        return list(range(start, last if self.end is None else min(last, self.end)))

    def observe(self, position: int, scores: Sequence[float] | np.ndarray) -> Mapping[str, float]:
        """Learn from the scores of a group. Returns the entries of `state` that have changed."""
        return {}

    def state(self) -> dict[str, float]:
        return {}

    def restore(self, state: Mapping[str, float]) -> None:
        """Continue from `state()`."""
