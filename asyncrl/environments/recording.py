"""Observations, calls and facts as a group records them (images by hash, bytes beside them), and their means."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, get_args

import numpy as np

from asyncrl.data.images import content_hash
from asyncrl.environments.observation import Message, Observation, PastTurn
from asyncrl.errors import BadStateError, UserError
from asyncrl.user_functions import storable
from protocol.messages import (
    EditedTurn,
    Group,
    Limit,
    ObservedImage,
    ObservedMessage,
    TextPart,
    ToolCall,
    TrajectoryRecord,
)
from protocol.messages.groups import LONGEST_CALL, MOST_CALLS, CallErrorKind

Decode = Callable[[np.ndarray], str]
"""Token ids as text. [T]"""


def recorded(observation: Observation, grids: Iterable[Sequence[int]]) -> tuple[ObservedMessage, ...]:
    """The messages of an observation; `grids` are those of its images, in order."""
    rest = iter(grids)
    return tuple(
        ObservedMessage(
            role=message.role,
            content=tuple(
                TextPart(text=part)
                if isinstance(part, str)
                else ObservedImage(content_hash=content_hash(part), grid=_three(next(rest)))
                for part in message.parts
            ),
        )
        for message in observation.messages
    )


def _three(grid: Sequence[int]) -> tuple[int, int, int]:
    temporal, height, width = map(int, grid)
    return temporal, height, width


def observation_of(messages: Iterable[ObservedMessage], blobs: Mapping[str, bytes | memoryview]) -> Observation:
    """The observation that was recorded. Raises UserError where `blobs` has not the bytes of an image, or others."""
    found: list[Message] = []
    for message in messages:
        for digest in (image.content_hash for image in images_of([message])):
            if digest not in blobs:
                raise UserError(f"the image {digest[:12]} of an observation came without its bytes")
            if (other := content_hash(blobs[digest])) != digest:
                raise UserError(f"the bytes of the image {digest[:12]} of an observation have the hash {other[:12]}")
        parts = (p.text if isinstance(p, TextPart) else bytes(blobs[p.content_hash]) for p in message.content)
        found.append(Message(message.role, tuple(parts)))
    return Observation(tuple(found))


def images_of(messages: Iterable[ObservedMessage]) -> list[ObservedImage]:
    """The images of messages, in order of appearance."""
    return [part for message in messages for part in message.content if isinstance(part, ObservedImage)]


def recorded_history(history: Iterable[PastTurn], shown: Iterable[ObservedMessage]) -> tuple[EditedTurn, ...]:
    """An edited history; `shown` are the messages before, whose images are all that it has."""
    grids = {image.content_hash: image.grid for image in images_of(shown)}
    return tuple(
        EditedTurn(
            turn=past.turn,
            text=past.text,
            shown=recorded(past.shown, (grids[content_hash(image)] for image in past.shown.images))
            if past.shown
            else (),
        )
        for past in history
    )


def history_of(turns: Iterable[EditedTurn], blobs: Mapping[str, bytes | memoryview]) -> tuple[PastTurn, ...]:
    """The edited history that was recorded. Raises as `observation_of`."""
    return tuple(PastTurn(t.turn, t.text, observation_of(t.shown, blobs) if t.shown else None) for t in turns)


def recorded_calls(info: Mapping[str, Any]) -> tuple[ToolCall, ...]:
    """The calls of a turn, of the `calls` that who runs an environment has put into its info."""
    return tuple(
        ToolCall(
            name=_cut(call["name"], 200),
            arguments=_cut(call["arguments"], LONGEST_CALL),
            error_kind=call["kind"],
            error=_cut(call["error"], LONGEST_CALL),
            seconds=call["seconds"],
        )
        for call in list(info.get("calls", ()))[:MOST_CALLS]
    )


def _cut(text: str, longest: int) -> str:
    text = storable(text)
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def described_turns(group: Group, index: int, decode: Decode) -> list[dict[str, Any]]:
    """The turns of a trajectory as JSON for people: text, reward, versions, calls, info, and what was shown."""
    start = group.span(index).start
    return [
        {
            "text": decode(group.token_ids[start + turn.start : start + turn.end]),
            "reward": turn.reward,
            "context": turn.context,
            "versions": sorted(set(group.versions[start + turn.start : start + turn.end].tolist())),
            "calls": [call.model_dump() for call in turn.calls],
            "info": turn.info,
            "shown": described_messages(turn.observation),
        }
        for turn in group.trajectories[index].turns
    ]


def described_messages(messages: Iterable[ObservedMessage]) -> list[dict[str, Any]]:
    """Texts as they are, images by their hash."""
    return [
        {
            "role": message.role,
            "parts": [p.text if isinstance(p, TextPart) else {"image": p.content_hash} for p in message.content],
        }
        for message in messages
    ]


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
