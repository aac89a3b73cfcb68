"""A group as rows of the index."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from asyncrl.journal.sample_tables import NOT_TRAINED
from asyncrl.rewards.presentation import plain_text
from protocol.messages import Group, Prompt, TrajectoryRecord


@dataclass(frozen=True)
class TrainedBatch:
    """What a step has made of its batch: `B` rows are trajectories, `M` runs over their tokens."""

    advantages: np.ndarray
    """[B] fp32"""
    logprobs: np.ndarray
    """[M] fp32 of the learner's policy, as in the step's metrics; NaN where nothing was trained."""
    masked: np.ndarray
    """[M] bool: dropped by the correction."""

    def part(self, first_row: int, rows: int, first_token: int, tokens: int) -> TrainedBatch:
        """Of some rows in a row."""
        here = slice(first_token, first_token + tokens)
        return TrainedBatch(self.advantages[first_row : first_row + rows], self.logprobs[here], self.masked[here])


@dataclass(frozen=True)
class PromptText:
    """What is shown of a prompt."""

    row_id: str
    messages: tuple[dict[str, str], ...]
    answer: str
    images: tuple[str, ...]
    """Content hashes."""
    videos: tuple[tuple[str, int], ...] = ()
    """Hash of the first frame, and number of frames."""

    @classmethod
    def of(cls, prompt: Prompt) -> PromptText:
        return cls(
            prompt.row_id,
            tuple({"role": message.role, "content": plain_text(message)} for message in prompt.messages),
            answer_text(prompt.answer),
            prompt.image_hashes,
            tuple((video.frame_hashes[0], len(video.frame_hashes)) for video in prompt.videos),
        )

    def row(self) -> tuple[int, str, str, str, str, str, str]:
        """Of the table of prompts. Equal prompts have equal ids."""
        messages, media = json.dumps(self.messages), json.dumps([self.images, self.videos])
        content = "\0".join((self.row_id, messages, self.answer, media)).encode(errors="surrogatepass")
        text = self.messages[-1]["content"]
        prompt_id = xxhash.xxh3_64_intdigest(content) >> 1
        return (
            prompt_id,
            _storable(self.row_id),
            _storable(text),
            _storable(text.casefold()),
            messages,
            self.answer,
            media,
        )

    @classmethod
    def from_row(cls, row_id: str, messages: str, answer: str, media: str) -> PromptText:
        images, videos = json.loads(media)
        return cls(row_id, tuple(json.loads(messages)), answer, tuple(images), tuple(map(tuple, videos)))


def answer_text(answer: Any) -> str:
    if answer is None:
        return ""
    return _storable(answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False, default=str))


def _storable(text: str) -> str:
    """SQLite takes no lone surrogates."""
    return text.encode(errors="backslashreplace").decode()


@dataclass(frozen=True)
class IndexedGroup:
    """Rows of the four tables, in the order of their columns."""

    prompt: tuple[Any, ...]
    group: tuple[Any, ...]
    trajectories: Sequence[tuple[Any, ...]]
    trained_tokens: tuple[int, bytes, bytes | None] | None


def index_group(
    group: Group, prompt: PromptText, *, step: int | None, version: int, trained: TrainedBatch | None = None
) -> IndexedGroup:
    """`version` has consumed it, at `step`; or would, if that is None. `trained` None: not known."""
    at = NOT_TRAINED if step is None else step
    prompt_row = prompt.row()
    differences = None if trained is None else trained.logprobs - group.logprobs
    staleness, largest = _extremes(group, version, differences)
    advantages = [None] * len(group.trajectories) if trained is None else _or_none(trained.advantages)
    rows = [
        (
            group.ticket_id,
            number,
            at,
            prompt_row[0],
            str(record.status),
            str(record.finish_reason),
            record.reward,
            advantages[number],
            length,
            staleness[number],
            largest[number],
            _error(record) if record.error_kind else "",
        )
        for number, (record, length) in enumerate(zip(group.trajectories, group.lengths.tolist(), strict=True))
    ]
    tokens = None
    if trained is not None and differences is not None:
        masked = np.packbits(trained.masked).tobytes() if trained.masked.any() else None
        with np.errstate(over="ignore"):  # infinite then, which is what it looks like
            tokens = (group.ticket_id, differences.astype(np.float16).tobytes(), masked)
    return IndexedGroup(prompt_row, (group.ticket_id, at, prompt_row[0], group.server_id), rows, tokens)


def _error(record: TrajectoryRecord) -> str:
    return _storable(": ".join(filter(None, (record.error_kind, record.error_message))))


def _extremes(group: Group, version: int, differences: np.ndarray | None) -> tuple[list[int], list[float | None]]:
    """Of each trajectory: versions that its oldest sampled token is behind, largest absolute difference."""
    size = len(group.trajectories)
    oldest, largest = np.full(size, version, np.int64), np.full(size, np.nan)
    some = np.flatnonzero(group.lengths)
    if some.size:
        starts = (np.cumsum(group.lengths) - group.lengths)[some]
        oldest[some] = np.minimum.reduceat(np.where(group.loss_mask == 1, group.versions, version), starts)
        if differences is not None:
            largest[some] = np.fmax.reduceat(np.abs(differences), starts)
    return (version - oldest).tolist(), _or_none(largest)


def _or_none(values: np.ndarray) -> list[float | None]:
    """Numbers as Python's, None for NaN."""
    return [None if value != value else value for value in values.tolist()]
