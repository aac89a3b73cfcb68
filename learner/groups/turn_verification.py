"""Verification of conversations: between two turns stands exactly what the environment's answer becomes, and no more.

The learner makes each bridge again of the messages and images that the group records, and each history that the ticket
has rewritten, and compares token ids, grids, content hashes and where segments begin. Turns tile the sampled tokens: a
token is trained if and only if a turn has sampled it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from asyncrl.environments.recording import history_of, images_of, observation_of
from asyncrl.errors import UserError
from asyncrl.processing.bridge import TurnBridge
from asyncrl.processing.history import History
from protocol.messages import (
    ConversationLimits,
    FinishReason,
    Group,
    Ticket,
    TokenSource,
    TrajectoryRecord,
    TrajectoryStatus,
    Turn,
)


class _Columns(NamedTuple):
    """Columns of one trajectory, [T] each."""

    token_ids: np.ndarray
    source: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray


def turn_problems(group: Group, ticket: Ticket, bridge: TurnBridge | None) -> Iterator[str]:
    """Compare the turns of a group with what its ticket allows, and with bridges made again; see `verify_group`.

    `bridge` is needed for the ticket of a conversation.
    """
    if ticket.conversation is None:
        if group.opening or group.blobs or any(_has_turns(record) for record in group.trajectories):
            yield "it has turns that an environment answered, and its ticket asks for one turn"
        return
    assert bridge is not None, "whoever writes tickets of conversations has a bridge"
    yield from _blob_problems(group)
    for index, record in enumerate(group.trajectories):
        for problem in _trajectory_problems(record, _columns(group, index), group.blobs, ticket, bridge):
            yield f"completion {index}: {problem}"


def bridge_problems(group: Group, ticket: Ticket, bridge: TurnBridge | None) -> Iterator[str]:
    """Problems of a group that was verified before: its bridges and segments must be those that this chat template and
    this ticket make."""
    if bridge is None or ticket.conversation is None:
        return
    for index, record in enumerate(group.trajectories):
        columns, history = _columns(group, index), History(bridge, ticket.conversation, ticket.prompt, pixels=False)
        for number, (turn, following) in enumerate(pairwise(record.turns)):
            for problem in _between_problems(turn, following, columns, group.blobs, history):
                yield f"completion {index}: after turn {number} {problem}"


def _has_turns(record: TrajectoryRecord) -> bool:
    said = any(t.observation or t.calls or t.info or t.context or t.history for t in record.turns)
    return len(record.turns) > 1 or bool(record.limit) or said


def _columns(group: Group, index: int) -> _Columns:
    place = group.span(index)
    columns = (group.token_ids, group.source, group.logprobs, group.versions)
    return _Columns(*(column[place] for column in columns))


def _blob_problems(group: Group) -> Iterator[str]:
    shown = {image.content_hash for image in images_of(group.opening)}
    for record in group.trajectories:
        shown.update(image.content_hash for turn in record.turns for image in images_of(turn.observation))
    for digest in group.blobs.keys() - shown:
        yield f"it brings the bytes of an image, {digest[:12]}, that no environment showed"


def _trajectory_problems(
    record: TrajectoryRecord,
    columns: _Columns,
    blobs: Mapping[str, memoryview],
    ticket: Ticket,
    bridge: TurnBridge,
) -> Iterator[str]:
    limits, length = ticket.conversation, len(columns.token_ids)
    assert limits is not None
    if not record.turns:
        yield "it has no turn"
        return
    if len(record.turns) > limits.turns:
        yield f"it has {len(record.turns)} turns, over the limit of {limits.turns}"
    images = sum(len(images_of(turn.observation)) for turn in record.turns)
    if images > limits.images:
        yield f"it was shown {images} images, over the limit of {limits.images}"
    if record.turns[0].context:
        yield f"its first turn has a history of {record.turns[0].context} tokens"
    history, start = History(bridge, limits, ticket.prompt, pixels=False), 0
    for number, turn in enumerate(record.turns):
        if turn.start != start or turn.end <= start:
            yield f"turn {number} has the tokens [{turn.start}, {turn.end}), and what came before it ends at {start}"
            return
        for problem in _turn_problems(turn, columns, ticket, limits):
            yield f"turn {number} {problem}"
        is_last = number == len(record.turns) - 1
        start = length if is_last else record.turns[number + 1].start
        if is_last:
            if turn.end != length or turn.observation or turn.history:
                yield f"something stands behind its last turn, which ends at token {turn.end} of {length}"
            break
        if turn.finish_reason is FinishReason.LENGTH:
            yield f"turn {number} was cut, and yet the conversation goes on"
        if not turn.end <= start <= length:
            yield f"turn {number + 1} begins at token {start}, inside another or behind the end"
            return
        for problem in _between_problems(turn, record.turns[number + 1], columns, blobs, history):
            yield f"after turn {number} {problem}"
    yield from _end_problems(record)
    grids = {image.content_hash: image.grid for turn in record.turns for image in images_of(turn.observation)}
    for image in (image for turn in record.turns for past in turn.history for image in images_of(past.shown)):
        if grids.get(image.content_hash) != image.grid:
            yield f"an edited history has the image {image.content_hash[:12]} with another grid, {image.grid}"


def _turn_problems(turn: Turn, columns: _Columns, ticket: Ticket, limits: ConversationLimits) -> Iterator[str]:
    length, last = turn.end - turn.start, int(columns.token_ids[turn.end - 1 : turn.end].sum())
    if (columns.source[turn.start : turn.end] != TokenSource.POLICY).any():
        yield "has another source than the policy at a token that it sampled"
    if length > limits.tokens_per_turn:
        yield f"has {length} tokens, over the limit of {limits.tokens_per_turn}"
    is_full = limits.tokens_per_turn == length or ticket.sampling.max_new_tokens == turn.end
    if turn.finish_reason is None:
        yield "does not say how it ended"
    elif turn.finish_reason is FinishReason.STOP and last not in ticket.sampling.stop_token_ids:
        yield (
            f"ended by a stop token, but its last token is {last}. "
            "The ids must be those that the engine sampled, never its text tokenised again"
        )
    elif turn.finish_reason is FinishReason.LENGTH and not is_full:
        yield f"was cut at {length} tokens, before the limit of {limits.tokens_per_turn}"
    if turn.reward is not None and not math.isfinite(turn.reward):
        yield f"has the reward {turn.reward}"


def _between_problems(
    turn: Turn, following: Turn, columns: _Columns, blobs: Mapping[str, memoryview], history: History
) -> Iterator[str]:
    """Compare the tokens between two turns with the bridge of the observation, or with the history as it is rewritten.

    `history` has the turns before, and goes on with this one.
    """
    history.add_turn(columns.token_ids[turn.start : turn.end])
    try:
        observation = observation_of(turn.observation, blobs)
        made = history.after(observation, history_of(turn.history, blobs))
    except UserError as error:
        yield str(error)
        return
    history.show(observation, made)
    if following.context != made.context:
        yield f"{_segment(following.context)}, and by the ticket's rule and the record {_segment(made.context)}"
    between = slice(turn.end, following.start)
    theirs, mine = columns.token_ids[between], np.concatenate([piece.token_ids for piece in made.pieces])
    if theirs.shape != mine.shape or (theirs != mine).any():
        place = next((i for i, (a, b) in enumerate(zip(theirs, mine, strict=False)) if a != b), "their end")
        if made.begins_segment:
            mine_are = f"the history as it is rewritten, from place {place} of the segment"
        else:
            mine_are = f"those of the recorded observation, from place {place} of the bridge"
        yield f"stand other tokens than {mine_are} ({len(theirs)} ids against {len(mine)})"
    grids, own = [list(image.grid) for image in images_of(turn.observation)], made.pieces[-1].image_grids.tolist()
    if grids != own:
        yield f"the image grids differ: {grids} against {own}"
    if (columns.source[between] != TokenSource.OBSERVATION).any() or columns.logprobs[between].any():
        yield "a token of the observation has another source or a log-prob: nobody sampled it there"
    version = columns.versions[turn.end - 1]
    if (columns.versions[between] != version).any():
        yield f"a token of the observation has another version than the token before it, {version}"


def _segment(context: int) -> str:
    return f"a segment of {context} tokens of history begins" if context else "no segment begins"


def _end_problems(record: TrajectoryRecord) -> Iterator[str]:
    last = record.turns[-1].finish_reason
    if last is not record.finish_reason:
        yield f"its last turn ended by {last}, and it by {record.finish_reason}"
    is_cut = record.finish_reason is FinishReason.LENGTH or bool(record.limit)
    if record.status.is_scored and is_cut != (record.status is TrajectoryStatus.TRUNCATED):
        reached = f"the limit of {record.limit}" if record.limit else record.finish_reason
        yield f"it is {record.status}, and ended by {reached}"
