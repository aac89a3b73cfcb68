"""One group in full: index, journal, tokenizer and images put together."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any

import numpy as np

from learner.samples.images import SampleImages
from learner.samples.model import SampleDetail, SampleImage, SampleRow, TrajectoryDetail
from learner.samples.rows import PromptText
from learner.samples.texts import TokenTexts
from protocol.messages import Group

NOT_KEPT = (
    "Its tokens are not kept any more: the newest trainer.keep_samples_gib of groups are, beside those that a restart "
    "needs"
)


def row_detail(db: sqlite3.Connection, source: str, rows: Sequence[SampleRow], images: SampleImages) -> SampleDetail:
    """What is left of a group that is not kept any more."""
    empty = np.zeros(0, np.int32)
    trajectories = tuple(
        TrajectoryDetail(
            trajectory=row.trajectory,
            rewards={},
            tokens=(),
            token_ids=empty,
            logprobs=empty.astype(np.float32),
            learner_logprobs=None,
            versions=empty,
            loss_mask=empty.astype(np.uint8),
            masked=empty.astype(bool),
            **_outcome(row),
        )
        for row in rows
    )
    return SampleDetail(
        rows=tuple(rows), trajectories=trajectories, problem=NOT_KEPT, **_prompt(db, source, rows, images)
    )


def group_detail(
    db: sqlite3.Connection,
    source: str,
    rows: Sequence[SampleRow],
    images: SampleImages,
    group: Group,
    texts: TokenTexts,
) -> SampleDetail:
    learner, masked = _trained_tokens(db, source, group)
    ends = np.cumsum(group.lengths)
    trajectories: list[TrajectoryDetail] = []
    for row, record, start, end in zip(rows, group.trajectories, ends - group.lengths, ends, strict=True):
        here = slice(int(start), int(end))
        trajectories.append(
            TrajectoryDetail(
                trajectory=row.trajectory,
                rewards=record.rewards,
                tokens=texts.each(group.token_ids[here]),
                token_ids=group.token_ids[here],
                logprobs=group.logprobs[here],
                learner_logprobs=None if learner is None else learner[here],
                versions=group.versions[here],
                loss_mask=group.loss_mask[here],
                masked=masked[here],
                **_outcome(row),
            )
        )
    return SampleDetail(
        rows=tuple(rows),
        trajectories=tuple(trajectories),
        problem=texts.problem,
        **_prompt(db, source, rows, images),
    )


def _outcome(row: SampleRow) -> dict[str, Any]:
    return {name: getattr(row, name) for name in ("status", "finish_reason", "reward", "advantage", "error")}


def _trained_tokens(db: sqlite3.Connection, source: str, group: Group) -> tuple[np.ndarray | None, np.ndarray]:
    """[N] the learner's log-probs, where they are known, and [N] which tokens the correction dropped."""
    found = db.execute(
        f"SELECT differences, masked FROM {source}.trained_tokens WHERE ticket_id = ?", (group.ticket_id,)
    ).fetchone()
    if found is None:
        return None, np.zeros(group.token_ids.size, bool)
    differences, masked = found
    bits = np.zeros(group.token_ids.size, np.uint8)
    if masked is not None:
        bits = np.unpackbits(np.frombuffer(masked, np.uint8), count=group.token_ids.size)
    return group.logprobs + np.frombuffer(differences, np.float16).astype(np.float32), bits.astype(bool)


def _prompt(db: sqlite3.Connection, source: str, rows: Sequence[SampleRow], images: SampleImages) -> dict[str, Any]:
    row_id, messages, answer, media, server_id = db.execute(
        f"SELECT row_id, messages, answer, media, server_id FROM {source}.groups JOIN {source}.prompts "
        "USING (prompt_id) WHERE ticket_id = ?",
        (rows[0].ticket_id,),
    ).fetchone()
    prompt = PromptText.from_row(row_id, messages, answer, media)
    shown: list[SampleImage] = [images.find(digest, row_id) for digest in prompt.images]
    shown += [images.find(digest, row_id, frames) for digest, frames in prompt.videos]
    return {
        "ticket_id": rows[0].ticket_id,
        "step": rows[0].step,
        "server_id": server_id,
        "row_id": row_id,
        "prompt": prompt.messages[-1]["content"],
        "messages": prompt.messages,
        "images": tuple(shown),
        "answer": answer,
    }
