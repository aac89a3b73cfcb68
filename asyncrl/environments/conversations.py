"""Statistics of environment trajectories, trained and evaluated: means, counts, and the end of the run when too many
fail."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Sequence
from typing import get_args

import numpy as np

from asyncrl.errors import BadStateError
from protocol.messages import Limit, TrajectoryRecord
from protocol.messages.turns import CallErrorKind

logger = logging.getLogger(__name__)

LAST_TRAJECTORIES = 200
"""Trajectories over which failures of the environment are counted."""
WARNING_SHARE, DEAD_SHARE = 0.05, 0.5
"""Shares of them above which a failing environment is warned of, and ends the run."""


class EnvironmentHealth:
    """Counts failures of the environment over the last trajectories, so that a dead one does not burn the night."""

    def __init__(self, then: str = "then start the run again: it goes on from its checkpoint") -> None:
        """`then`: what to do where it has been repaired."""
        self._then = then
        self._kinds: deque[str] = deque(maxlen=LAST_TRAJECTORIES)
        """How the environment failed in each of the last trajectories; empty: it did not."""
        self._warned = False

    def observe(self, records: Sequence[TrajectoryRecord]) -> None:
        """Count these trajectories, too. Raises BadStateError where more than half of the last 200 failed."""
        for record in records:
            self._kinds.append(record.environment_error)
            if not record.environment_error:
                continue
            failed = Counter(filter(None, self._kinds))
            if failed.total() <= WARNING_SHARE * LAST_TRAJECTORIES:
                continue
            kinds = ", ".join(f"{number} {name}" for name, number in failed.most_common())
            said = f"the environment failed in {failed.total()} of the last {len(self._kinds)} trajectories ({kinds})"
            example = f"the newest says: {record.error_message}"
            if failed.total() > DEAD_SHARE * LAST_TRAJECTORIES:
                raise BadStateError(
                    f"{said}; {example}. Bring back what the environment needs (a service, a file, memory) or repair "
                    f"it (asyncrl env try), {self._then}"
                )
            if not self._warned:
                self._warned = True
                logger.warning("%s; %s. Above %d%% the run stops", said, example, 100 * DEAD_SHARE)


def describe_conversations(records: Sequence[TrajectoryRecord]) -> dict[str, float]:
    """Means of turns, calls and rewards, and counts of ends and of failures by kind, as `env/...`.

    Each record has one end: `done` (the policy's or the environment's), `cut` (its last turn), a limit, or `failed`.
    """
    turns = [len(record.turns) for record in records]
    kinds = Counter(filter(None, (record.environment_error for record in records)))
    ends = Counter(record.end for record in records)
    calls = [call for record in records for turn in record.turns for call in turn.calls]
    mistakes = Counter(call.error_kind for call in calls if call.error_kind)
    rewards: dict[bool, list[float]] = {True: [], False: []}
    for record in records:
        if record.reward is not None:
            has_called = any(not call.error_kind for turn in record.turns for call in turn.calls)
            rewards[has_called].append(record.reward)
    return {
        "env/turns": float(np.mean(turns)),
        "env/turns_max": float(max(turns)),
        "env/segments": float(np.mean([len(record.segment_starts) for record in records])),
        **{
            f"env/reward_{'with' if called else 'without'}_calls": float(np.mean(found))
            for called, found in rewards.items()
            if found
        },
        "env/error_rate": kinds.total() / len(records),
        "env/calls": len(calls) / len(records),
        "env/call_error_rate": mistakes.total() / max(1, len(calls)),
        **{f"env/call_errors/{kind}": float(mistakes[kind]) for kind in get_args(CallErrorKind)[1:]},
        **{f"env/ends/{end}": float(ends[end]) for end in ("done", "cut", *filter(None, get_args(Limit)), "failed")},
        **{f"env/errors/{kind.removeprefix('environment_')}": float(number) for kind, number in kinds.items()},
    }
