"""Data order: a seeded permutation of the rows, fresh each epoch.

Its whole state is one number, the position, which is all that resuming needs.
"""

from __future__ import annotations

import numpy as np

from asyncrl.errors import UserError


class DataOrder:
    """Position 0, 1, 2, ... -> row. Every epoch of `num_rows` positions visits each row once."""

    def __init__(self, num_rows: int, seed: int, shuffle: bool = True) -> None:
        if num_rows < 1:
            raise UserError("there are no training rows: check data.train_files and data.max_train_rows")
        self.num_rows = num_rows
        self._seed = seed
        self._shuffle = shuffle
        self._permutations: dict[int, np.ndarray] = {}

    def row_at(self, position: int) -> int:
        """The row at a position; depends on nothing but the arguments of this object and the position."""
        if position < 0:
            raise ValueError(f"position is {position}: expected 0 or more")
        epoch, place = divmod(position, self.num_rows)
        return int(self._permutation(epoch)[place]) if self._shuffle else place

    def _permutation(self, epoch: int) -> np.ndarray:
        """[num_rows] of one epoch; the last two are kept, since a step may span both."""
        if epoch not in self._permutations:
            if len(self._permutations) == 2:
                del self._permutations[min(self._permutations)]
            # Raw bits are the part of NumPy's generators whose stream never changes between releases
            # (NEP 19), so a run resumes in the same order after an upgrade.
            bits = np.random.PCG64(np.random.SeedSequence([self._seed, epoch])).random_raw(self.num_rows)
            self._permutations[epoch] = np.argsort(bits, kind="stable")
        return self._permutations[epoch]
