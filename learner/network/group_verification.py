"""Verification, the alignment contract: a group counts only if it is exactly what its ticket allowed.

The learner encodes the prompt itself and compares token ids, grids and hashes; it checks every sampled token's
id, log-prob and version. A mismatch refuses the group with a reason that names the row.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np

from asyncrl.errors import UserError
from asyncrl.models.processing import PromptFacts
from protocol.errors import ErrorCode, ProtocolError
from protocol.messages import FinishReason, Group, Ticket, printable

LOGPROB_SLACK = 1e-4
"""Distance above 0 by which rounding may put the log-prob of a certain token."""


def verify_group(
    group: Group,
    ticket: Ticket,
    prompt: PromptFacts,
    *,
    sender: str,
    version: int,
    vocabulary: int,
    components: Collection[str],
) -> None:
    """Raise ProtocolError(REFUSED_GROUP) naming the row unless the group fits its ticket at the learner's `version`.

    `sender` is the server whose connection it came over, `components` are the names of the reward's components.
    """
    problem = (
        _sender_problem(group, sender)
        or _prompt_problem(group, prompt)
        or _shape_problem(group, ticket)
        or _token_problem(group, ticket, vocabulary)
        or _ending_problem(group, ticket)
        or _version_problem(group, ticket, version)
        or _score_problem(group, components)
    )
    if problem:
        raise ProtocolError(ErrorCode.REFUSED_GROUP, f"row {ticket.prompt.row_id} from {sender}: {problem}")


def check_journaled(group: Group, ticket: Ticket, prompt: PromptFacts) -> None:
    """Raise UserError unless a journaled group is of the prompt that its ticket has now, after a restart."""
    problem = _prompt_problem(group, prompt)
    if problem:
        raise UserError(
            f"--resume: the journaled group of ticket {ticket.ticket_id} was not sampled from row "
            f"{ticket.prompt.row_id} as it is now: {problem}. Resume with the data, the data.* settings and the "
            "model folder that the run began with"
        )


def _sender_problem(group: Group, sender: str) -> str | None:
    """Check the server's signature: its name goes into the journal."""
    return None if group.server_id == sender else f"it is signed by {group.server_id}"


def _prompt_problem(group: Group, prompt: PromptFacts) -> str | None:
    videos = prompt.video_grids[:0] if group.video_grids is None else group.video_grids
    problem = (
        _media_problem("image", group.image_hashes, prompt.image_hashes)
        or _media_problem("video", group.video_hashes, prompt.video_hashes)
        or _grid_problem("image", group.image_grids, prompt.image_grids)
        or _grid_problem("video", videos, prompt.video_grids)
    )
    if problem or _same(group.prompt_ids, prompt.token_ids):
        return problem
    theirs, mine = group.prompt_ids, prompt.token_ids
    common = min(len(theirs), len(mine))
    differing = np.flatnonzero(theirs[:common] != mine[:common])
    position = int(differing[0]) if differing.size else common
    return f"prompt ids differ from position {position} ({len(theirs)} ids against {len(mine)})"


def _media_problem(kind: str, theirs: Sequence[str], mine: Sequence[str]) -> str | None:
    """Compare hashes. `theirs` are of the bytes that the server encoded, in the order in which its engine saw them."""
    if theirs == mine:
        return None
    if len(theirs) != len(mine):
        return f"the engine saw {len(theirs)} {kind}(s), the prompt has {len(mine)}"
    if sorted(theirs) == sorted(mine):
        return f"the {kind}s are in another order"
    number = next(i for i, (a, b) in enumerate(zip(theirs, mine, strict=True)) if a != b)
    what = "other bytes" if kind == "image" else "other frames, or the same in another order or number"
    return f"{kind} {number} has {what}: their hash is {theirs[number][:12]}, not {mine[number][:12]}"


def _grid_problem(kind: str, theirs: np.ndarray, mine: np.ndarray) -> str | None:
    if _same(theirs, mine):
        return None
    return (
        f"{kind} grids (temporal, height, width in patches) differ: {theirs.tolist()} against {mine.tolist()}. "
        "Do both sides have the same processor settings, such as the limits of the size?"
    )


def _same(theirs: np.ndarray, mine: np.ndarray) -> bool:
    """Compare integer arrays as bytes, which is faster than by number."""
    return theirs.shape == mine.shape and theirs.tobytes() == mine.astype(theirs.dtype, copy=False).tobytes()


def _shape_problem(group: Group, ticket: Ticket) -> str | None:
    if len(group.trajectories) != ticket.group_size:
        return f"{len(group.trajectories)} trajectories for a group size of {ticket.group_size}"
    longest = int(group.lengths.max())
    if longest > ticket.sampling.max_new_tokens:
        return f"a completion of {longest} tokens, over max_new_tokens {ticket.sampling.max_new_tokens}"
    if group.loss_mask.size and group.loss_mask.max() > 1:
        return "loss_mask has values other than 0 and 1"
    return None


def _token_problem(group: Group, ticket: Ticket, vocabulary: int) -> str | None:
    if group.token_ids.size == 0:
        return None
    if int(np.maximum.reduce(group.token_ids.view(np.uint32))) >= vocabulary:  # a negative id becomes a large one
        return f"token ids outside the vocabulary of {vocabulary}"
    token_ids, logprobs = _sampled(group)
    banned = np.unique(token_ids[np.isin(token_ids, ticket.sampling.banned_token_ids)])
    if banned.size:
        return (
            f"the policy sampled image placeholder ids {banned.tolist()}: the engine must ban them, "
            "or training would fail with image features that do not match image tokens"
        )
    # NaN fails both comparisons.
    if logprobs.size and not (logprobs.max() <= LOGPROB_SLACK and logprobs.min() > -np.inf):
        return "a sampled token has a log-prob that is not finite or above 0"
    return None


def _ending_problem(group: Group, ticket: Ticket) -> str | None:
    """Check how completions end: text that is tokenised again loses its stop token, or changes its length."""
    ends = np.cumsum(group.lengths)
    for index, (record, length, end) in enumerate(
        zip(group.trajectories, group.lengths.tolist(), ends.tolist(), strict=True)
    ):
        if not length or not group.loss_mask[end - 1]:
            continue
        last, most = int(group.token_ids[end - 1]), ticket.sampling.max_new_tokens
        if record.finish_reason is FinishReason.STOP and last not in ticket.sampling.stop_token_ids:
            return (
                f"completion {index} ended by a stop token, but its last token is {last}. "
                "The ids must be those that the engine sampled, never its text tokenised again"
            )
        if record.finish_reason is FinishReason.LENGTH and length < most:
            return (
                f"completion {index} was cut at {length} tokens, before max_new_tokens {most}. The ids must be those "
                "that the engine sampled, and its context must hold the longest prompt and completion"
            )
    return None


def _sampled(group: Group) -> tuple[np.ndarray, np.ndarray]:
    """Select ids and log-probs of the tokens that the policy sampled; no copy where that is all of them. [S], [S]"""
    if group.loss_mask.min() == 1:
        return group.token_ids, group.logprobs
    sampled = group.loss_mask == 1
    return group.token_ids[sampled], group.logprobs[sampled]


def _version_problem(group: Group, ticket: Ticket, version: int) -> str | None:
    if group.versions.size == 0:
        return None
    oldest, newest = int(group.versions.min()), int(group.versions.max())
    if oldest < ticket.min_version or newest > version:
        return f"token versions {oldest} to {newest}, but the ticket allows {ticket.min_version} to {version}"
    if group.kv_versions is not None:
        if (group.kv_versions > group.versions).any():
            return "a token was sampled from a key-value cache that is newer than the policy that sampled it"
        if group.kv_versions.min() < ticket.min_version:
            return f"the key-value cache is of version {group.kv_versions.min()}, before {ticket.min_version}"
    return _falling_problem(group) if oldest < newest else None


def _falling_problem(group: Group) -> str | None:
    """Check that versions never fall within a completion: an engine only takes up newer weights."""
    owner = np.repeat(np.arange(group.lengths.size), group.lengths)
    sampled = group.loss_mask == 1
    owner, versions = owner[sampled], group.versions[sampled]
    fallen = np.flatnonzero((np.diff(versions) < 0) & (np.diff(owner) == 0))
    if not fallen.size:
        return None
    before, after = versions[fallen[0] : fallen[0] + 2].tolist()
    return (
        f"completion {owner[fallen[0]]} has a token of version {before} and then one of version {after}: versions "
        "within a completion never fall, so these are not those that sampled it"
    )


def _score_problem(group: Group, components: Collection[str]) -> str | None:
    expected = set(components)
    for index, record in enumerate(group.trajectories):
        scored = record.status.is_scored
        if scored != (record.reward is not None):
            return f"trajectory {index} is {record.status} with reward {record.reward}"
        if record.reward is not None and not math.isfinite(record.reward):
            return f"trajectory {index} has reward {record.reward}"
        if not scored and not record.error_kind:
            return f"trajectory {index} is {record.status} without an error kind"
        if scored and record.rewards.keys() != expected:
            return (
                f"trajectory {index} has the reward components {_named(record.rewards)}, here they are "
                f"{_named(components)}. Do both sides have the same reward.functions?"
            )
        if not all(map(math.isfinite, record.rewards.values())):
            return f"trajectory {index} has a reward component that is not finite"
    return None


def _named(components: Collection[str]) -> str:
    """List names that come from a peer, few and short."""
    names = sorted(printable(name, 50) for name in list(components)[:10])
    return ", ".join(names) + (f" and {len(components) - 10} more" if len(components) > 10 else "") or "none"
