"""One group in full: what index, journal and tokenizer know of its trajectories."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any

import numpy as np

from asyncrl.journal.sample_rows import PromptText
from asyncrl.tools.samples.model import SampleRow, TrajectoryDetail
from asyncrl.tools.samples.texts import TokenTexts
from protocol.messages import Group

NOT_KEPT = (
    "its tokens are not kept any more: the newest trainer.keep_samples_gib of groups are, beside those that a restart "
    "needs"
)
DAMAGED = "its tokens cannot be read: {} is {}. Restore that file, or copy the run directory again"
TrainedTokens = tuple[np.ndarray | None, np.ndarray]
"""[N] the learner's log-probs, None where they are not known, and [N] whether the correction dropped the token."""


def read_prompt(db: sqlite3.Connection, source: str, ticket_id: int) -> tuple[PromptText, str]:
    """And the server that has sampled it."""
    *prompt, server_id = db.execute(
        f"SELECT row_id, messages, answer, media, server_id FROM {source}.groups JOIN {source}.prompts "
        "USING (prompt_id) WHERE ticket_id = ?",
        (ticket_id,),
    ).fetchone()
    return PromptText.from_row(*prompt), server_id


def read_trained_tokens(db: sqlite3.Connection, source: str, group: Group) -> TrainedTokens:
    total = group.token_ids.size
    found = db.execute(
        f"SELECT differences, masked FROM {source}.trained_tokens WHERE ticket_id = ?", (group.ticket_id,)
    ).fetchone()
    if found is None:
        return None, np.zeros(total, bool)
    differences, masked = found
    learner = group.logprobs + np.frombuffer(differences, np.float16).astype(np.float32)
    if masked is None:
        return learner, np.zeros(total, bool)
    return learner, np.unpackbits(np.frombuffer(masked, np.uint8), count=total).astype(bool)


def trajectory_details(
    rows: Sequence[SampleRow], group: Group | None, tokens: TrainedTokens | None, texts: TokenTexts
) -> tuple[TrajectoryDetail, ...]:
    """Without its group, a trajectory is what its row says."""
    if group is None or tokens is None:
        return tuple(TrajectoryDetail(**_said(row)) for row in rows)
    learner, masked = tokens
    ends = np.cumsum(group.lengths)
    parts = [slice(int(end - length), int(end)) for end, length in zip(ends, group.lengths, strict=True)]
    return tuple(
        TrajectoryDetail(
            **_said(row),
            rewards=record.rewards,
            tokens=texts.each(group.token_ids[here]),
            token_ids=group.token_ids[here],
            logprobs=group.logprobs[here],
            learner_logprobs=None if learner is None else learner[here],
            versions=group.versions[here],
            loss_mask=group.loss_mask[here],
            masked=masked[here],
        )
        for row, record, here in zip(rows, group.trajectories, parts, strict=True)
    )


def _said(row: SampleRow) -> dict[str, Any]:
    """Under the same names in both."""
    names = ("trajectory", "status", "finish_reason", "reward", "advantage", "error")
    return {name: getattr(row, name) for name in names}
