"""Prompt sources that pass over rows by their latest groups: GRESO, and pass rates near a target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import xxhash

from asyncrl.data.prompt_sources import DataOrder, PromptSource
from asyncrl_plugins.curricula.settings import GresoConfig, PassRateConfig

EQUAL = 1e-6
"""Scores that differ by no more than this count as equal."""


class AdaptiveSource(PromptSource):
    """Passes over rows with the `skip_probability` of a subclass, which is 0 for a row that was never seen."""

    learns = True

    def __init__(self, order: DataOrder, seed: int, component: str, end: int | None = None):
        super().__init__(end)
        self.component = component
        self.order = order
        self._seed = seed
        self._rows: dict[int, float] = {}
        """Known statistics of each row that was sampled."""

    def skip_probability(self, row: int) -> float:
        raise NotImplementedError

    def next(self, n: int, start: int) -> list[int]:
        chosen: list[int] = []
        position = start
        while len(chosen) < n and (self.end is None or position < self.end):
            if self._uniform(position) >= self.skip_probability(self.order.row_at(position)):
                chosen.append(position)
            position += 1
        return chosen

    def _uniform(self, position: int) -> float:
        """A number in [0, 1) that belongs to this position."""
        return xxhash.xxh3_64_intdigest(f"visit {position}".encode(), seed=self._seed) / 2**64

    def state(self) -> dict[str, float]:
        return {f"row {row}": value for row, value in self._rows.items()}

    def restore(self, state: Mapping[str, float]) -> None:
        self._rows = {int(key[4:]): value for key, value in state.items() if key.startswith("row ")}

    def _know(self, row: int, value: float) -> dict[str, float]:
        self._rows[row] = value
        return {f"row {row}": value}


GRESO_STEP, GRESO_LEAST, GRESO_MOST, GRESO_FLOOR = 0.01, 0.05, 0.95, 0.01
"""Change of a base probability after a step, its bounds, and the least probability of a visit (the authors' code)."""


class Greso(AdaptiveSource):
    """GRESO (arXiv 2506.02177): rows whose latest groups had no spread are passed over with probability
    1 - max(p^z, 0.01), z of them in a row.

    p is `p_easy` for a row whose last group was all right and `p_hard` for any other without spread. After as many
    groups of rows that were seen before as a step takes, each moves by 0.01: down where the share of such groups is at
    its target or above, else up. A row is remembered as z, negative if it is hard; 0 after a group with spread.
    """

    def __init__(
        self,
        config: GresoConfig,
        order: DataOrder,
        seed: int,
        *,
        accuracy: str,
        per_step: int,
        end: int | None = None,
    ):
        super().__init__(order, seed, config.component or accuracy, end)
        self._easy_score = config.easy_score
        self._targets = {"easy": config.target_easy, "hard": config.target_hard}
        self._per_step = per_step
        self._numbers = {"p_easy": config.explore, "p_hard": config.explore, "seen": 0.0, "easy": 0.0, "hard": 0.0}

    def skip_probability(self, row: int) -> float:
        z = self._rows.get(row, 0.0)
        return greso_skip_probability(self._numbers["p_easy" if z > 0 else "p_hard"], abs(z))

    def observe(self, position: int, scores: Sequence[float] | np.ndarray) -> Mapping[str, float]:
        if len(scores) < 2:
            return {}
        row = self.order.row_at(position)
        was_seen, z = row in self._rows, abs(self._rows.get(row, 0.0))
        has_spread = float(np.ptp(scores)) > EQUAL
        is_easy = float(np.mean(scores)) >= self._easy_score
        changed = self._know(row, 0.0 if has_spread else z + 1.0 if is_easy else -(z + 1.0))
        return changed | self._adapt("" if has_spread else "easy" if is_easy else "hard") if was_seen else changed

    def _adapt(self, kind: str) -> dict[str, float]:
        """Count a group of a row that was seen before; after a step's worth of them move both probabilities."""
        numbers = self._numbers
        for name in ("seen", *([kind] if kind else [])):
            numbers[name] += 1.0
        if numbers["seen"] >= self._per_step:
            for name, target in self._targets.items():
                step = -GRESO_STEP if numbers[name] / numbers["seen"] >= target else GRESO_STEP
                numbers[f"p_{name}"] = min(max(numbers[f"p_{name}"] + step, GRESO_LEAST), GRESO_MOST)
            numbers.update(seen=0.0, easy=0.0, hard=0.0)
        return dict(numbers)

    def state(self) -> dict[str, float]:
        return super().state() | self._numbers

    def restore(self, state: Mapping[str, float]) -> None:
        super().restore(state)
        self._numbers.update({name: state[name] for name in self._numbers if name in state})


def greso_skip_probability(p: float, z: float) -> float:
    """1 - max(p^z, 0.01) (arXiv 2506.02177, eq. 4, with the floor of the authors' code)."""
    return 1.0 - max(p**z, GRESO_FLOOR)


class PassRate(AdaptiveSource):
    """Rows whose pass rate is far from a target are visited less often: with probability `floor` where it is as far as
    it can be, 1 where it is there, and linear between.

    The pass rate of a row is the moving average of its groups' mean score, within [0, 1].
    """

    def __init__(
        self,
        config: PassRateConfig,
        order: DataOrder,
        seed: int,
        *,
        accuracy: str,
        per_step: int,
        end: int | None = None,
    ):
        super().__init__(order, seed, config.component or accuracy, end)
        self._target, self._floor, self._memory = config.target, config.floor, config.memory

    def skip_probability(self, row: int) -> float:
        rate = self._rows.get(row)
        if rate is None:
            return 0.0
        distance = abs(rate - self._target) / max(self._target, 1.0 - self._target)
        return (1.0 - self._floor) * distance

    def observe(self, position: int, scores: Sequence[float] | np.ndarray) -> Mapping[str, float]:
        if not len(scores):
            return {}
        row, mean = self.order.row_at(position), float(np.clip(np.mean(scores), 0.0, 1.0))
        before = self._rows.get(row, mean)
        return self._know(row, self._memory * before + (1.0 - self._memory) * mean)
