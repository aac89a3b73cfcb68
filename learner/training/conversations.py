"""What came of trajectories that an environment answered: of a step that trained them, or of an evaluation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import get_args

import numpy as np

from protocol.messages import Limit, TrajectoryRecord
from protocol.messages.turns import CallErrorKind


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
