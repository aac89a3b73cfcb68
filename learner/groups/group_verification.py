"""Verification, the alignment contract: a group counts only if it is exactly what its ticket allowed.

The learner encodes the prompt itself and compares token ids, grids and hashes; it checks every sampled token's
id, log-prob and version. A mismatch refuses the group with a reason that names the row.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from asyncrl.errors import UserError
from asyncrl.models.token_trace import TokenTrace
from asyncrl.processing.bridge import TurnBridge
from asyncrl.processing.encoded_prompt import EncodedPrompt
from asyncrl.user_functions import one_line
from learner.groups.ticket import PreparedTicket
from learner.groups.turn_verification import turn_problems
from protocol.errors import ErrorCode, ProtocolError
from protocol.messages import FinishReason, Group, Ticket, TicketKind, TokenSource, Turn, printable

logger = logging.getLogger(__name__)

LOGPROB_SLACK = 1e-4
"""Distance above 0 by which rounding may put the log-prob of a certain token."""


def verify_answer(
    verify: Callable[..., None], group: Group, prepared: PreparedTicket, *, sender: str, **facts: Any
) -> None:
    """Verify the answer to a ticket by `verify_group`, with these `facts`. Raises ProtocolError and nothing else:
    nothing that a peer sends may end the thread that reads it."""
    try:
        verify(group, prepared.ticket, prepared.measured_of(group), sender=sender, **facts)
        return
    except ProtocolError:
        raise
    except UserError as error:  # what an environment opened with cannot be read
        reason = str(error)
    except Exception as error:
        logger.exception("the group of ticket %d from %s cannot be verified", group.ticket_id, sender)
        reason = f"it cannot be verified: {one_line(error)}"
    raise ProtocolError(ErrorCode.REFUSED_GROUP, f"from {sender}: {reason}")


def verify_group(
    group: Group,
    ticket: Ticket,
    prompt: EncodedPrompt,
    *,
    sender: str,
    version: int,
    vocabulary: int,
    components: Collection[str],
    bridge: TurnBridge | None = None,
    max_prompt_length: float = math.inf,
    traces: Mapping[str, TokenTrace] | None = None,
) -> None:
    """Raise ProtocolError(REFUSED_GROUP) naming the row unless the group fits its ticket at the learner's `version`.

    `sender` is the server whose connection it came over, `components` are the names of the reward's components.
    `bridge` makes the tokens between turns, for the ticket of a conversation. `max_prompt_length` is the most tokens of
    a prompt with what the environment opened with; the row's own is measured before the run. `traces` are those that
    the learner takes.
    """
    problems = chain(
        [f"it is signed by {group.server_id}"] if group.server_id != sender else [],
        prompt_problems(group, prompt),
        _opening_problems(group, max_prompt_length),
        _shape_problems(group, ticket),
        _request_problems(group, ticket),
        _token_problems(group, ticket, vocabulary),
        turn_problems(group, ticket, bridge),
        _source_problems(group, ticket) if ticket.conversation is None else (),
        _ending_problems(group, ticket) if ticket.conversation is None else (),
        _version_problems(group, ticket, version),
        _score_problems(group, components),
        _trace_problems(group, traces or {}),
    )
    if problem := next(problems, None):
        raise ProtocolError(ErrorCode.REFUSED_GROUP, f"row {ticket.prompt.row_id} from {sender}: {problem}")


def prompt_problems(group: Group, prompt: EncodedPrompt) -> Iterator[str]:
    """Compare what a group was sampled from with the prompt that its ticket has."""
    yield from _media_problems("image", group.image_hashes, prompt.image_hashes)
    yield from _media_problems("video", group.video_hashes, prompt.video_hashes)
    video_grids = prompt.video_grids[:0] if group.video_grids is None else group.video_grids
    for kind, theirs, mine in (
        ("image", group.image_grids, prompt.image_grids),
        ("video", video_grids, prompt.video_grids),
    ):
        if not _same(theirs, mine):
            yield (
                f"{kind} grids differ: {theirs.tolist()} against {mine.tolist()}. "
                "Do both sides have the same processor settings, such as the limits of the size?"
            )
    theirs, mine = group.prompt_ids, prompt.token_ids
    if not _same(theirs, mine):
        position = next((i for i, (a, b) in enumerate(zip(theirs, mine, strict=False)) if a != b), "their end")
        yield f"prompt ids differ from position {position} ({len(theirs)} ids against {len(mine)})"


def _opening_problems(group: Group, longest: float) -> Iterator[str]:
    if group.opening and (tokens := len(group.prompt_ids)) > longest:
        yield f"with the environment's opening the prompt has {tokens} tokens, over data.max_prompt_length = {longest}"


def _media_problems(kind: str, theirs: Sequence[str], mine: Sequence[str]) -> Iterator[str]:
    """Compare hashes. `theirs` are of the bytes that the server encoded, in the order in which its engine saw them."""
    if len(theirs) != len(mine):
        yield f"the engine saw {len(theirs)} {kind}(s), the prompt has {len(mine)}"
    elif theirs != mine and sorted(theirs) == sorted(mine):
        yield f"the {kind}s are in another order"
    what = "other bytes" if kind == "image" else "other frames, or the same in another order or number"
    for number, (other, own) in enumerate(zip(theirs, mine, strict=False)):
        if other != own:
            yield f"{kind} {number} has {what}: their hash is {other[:12]}, not {own[:12]}"


def _same(theirs: np.ndarray, mine: np.ndarray) -> bool:
    """Compare integer arrays as bytes, which is faster than by number."""
    return theirs.shape == mine.shape and theirs.tobytes() == mine.astype(theirs.dtype, copy=False).tobytes()


def _shape_problems(group: Group, ticket: Ticket) -> Iterator[str]:
    if len(group.trajectories) != ticket.group_size:
        yield f"{len(group.trajectories)} trajectories for a group size of {ticket.group_size}"
    longest = int(group.lengths.max())
    if longest > ticket.sampling.max_new_tokens:
        yield f"a completion of {longest} tokens, over max_new_tokens {ticket.sampling.max_new_tokens}"
    for index, record in enumerate(group.trajectories):
        if record.role is not (role := ticket.role(index)):
            yield f"trajectory {index} has the role {record.role}, its ticket asks for {role}"


def _request_problems(group: Group, ticket: Ticket) -> Iterator[str]:
    """Check that completions begin with what their requests put there, of which no policy sampled anything."""
    for index, record in enumerate(group.trajectories):
        if record.image_hashes != ticket.request(index).images:
            yield f"the engine saw other images for completion {index} than those of its request"
    starts = np.cumsum(group.lengths) - group.lengths
    for index, request in enumerate(ticket.requests):
        count, start, length = len(request.prefix), int(starts[index]), int(group.lengths[index])
        if not count:
            continue
        place = slice(start, start + min(count, length))
        if not _same(group.token_ids[place], np.asarray(request.prefix)):
            yield f"completion {index} does not begin with the {count} token ids that its request puts there"
        if group.logprobs[place].any():
            yield f"completion {index} has a log-prob on the {count} tokens that its request puts there"
        is_whole = count == ticket.sampling.max_new_tokens or request.prefix[-1] in ticket.sampling.stop_token_ids
        if (length == count) != is_whole:
            rest = "nothing may be" if is_whole else "something must be"
            yield f"completion {index} has {length} tokens, but behind the {count} of its request {rest} sampled"


def _source_problems(group: Group, ticket: Ticket) -> Iterator[str]:
    """Compare sources and turns where nobody answers: tokens of a prefix are inserted, and the policy samples the
    others, in one turn."""
    owner = np.repeat(np.arange(group.lengths.size), group.lengths)
    place = np.arange(owner.size) - (np.cumsum(group.lengths) - group.lengths)[owner]
    prefixes = np.array([len(ticket.request(index).prefix) for index in range(group.lengths.size)])
    expected = np.where(place < prefixes[owner], TokenSource.INSERTED, TokenSource.POLICY)
    for position in np.flatnonzero(group.source != expected)[:1]:
        index = owner[position]
        yield f"completion {index} has other sources than {prefixes[index]} inserted tokens and then sampled ones"
    for index, (record, length) in enumerate(zip(group.trajectories, group.lengths.tolist(), strict=True)):
        start = int(prefixes[index])
        if record.turns != ((Turn(start=start, end=length),) if start < length else ()):
            spans = ", ".join(f"[{turn.start}, {turn.end})" for turn in record.turns) or "none"
            yield f"completion {index} has the turn {spans}, but its sampled tokens are [{start}, {length})"


def _token_problems(group: Group, ticket: Ticket, vocabulary: int) -> Iterator[str]:
    if group.token_ids.size == 0:
        return
    if int(np.maximum.reduce(group.token_ids.view(np.uint32))) >= vocabulary:  # a negative id becomes a large one
        yield f"token ids outside the vocabulary of {vocabulary}"
    token_ids, logprobs = group.token_ids, group.logprobs
    sampled = group.is_sampled
    if not sampled.all():  # else no copy
        token_ids, logprobs = token_ids[sampled], logprobs[sampled]
    banned = np.unique(token_ids[np.isin(token_ids, ticket.sampling.banned_token_ids)])
    if banned.size:
        yield (
            f"the policy sampled image placeholder ids {banned.tolist()}: the engine must ban them, "
            "or training would fail with image features that do not match image tokens"
        )
    # NaN fails both comparisons.
    if logprobs.size and not (logprobs.max() <= LOGPROB_SLACK and logprobs.min() > -np.inf):
        yield "a sampled token has a log-prob that is not finite or above 0"


def _ending_problems(group: Group, ticket: Ticket) -> Iterator[str]:
    """Check how completions end: text that is tokenised again loses its stop token, or changes its length."""
    most = ticket.sampling.max_new_tokens
    ends = np.cumsum(group.lengths).tolist()
    for index, (record, length, end) in enumerate(zip(group.trajectories, group.lengths.tolist(), ends, strict=True)):
        if not length or group.source[end - 1] != TokenSource.POLICY:
            continue
        last = int(group.token_ids[end - 1])
        if record.finish_reason is FinishReason.STOP and last not in ticket.sampling.stop_token_ids:
            yield (
                f"completion {index} ended by a stop token, but its last token is {last}. "
                "The ids must be those that the engine sampled, never its text tokenised again"
            )
        if record.finish_reason is FinishReason.LENGTH and length < most:
            yield (
                f"completion {index} was cut at {length} tokens, before max_new_tokens {most}. The ids must be those "
                "that the engine sampled, and its context must hold the longest prompt and completion"
            )


def _version_problems(group: Group, ticket: Ticket, version: int) -> Iterator[str]:
    if group.versions.size == 0:
        return
    oldest, newest = int(group.versions.min()), int(group.versions.max())
    if ticket.kind is TicketKind.EVAL:  # its score is that of one policy
        version = ticket.min_version
    if oldest < ticket.min_version or newest > version:
        yield f"token versions {oldest} to {newest}, but the ticket allows {ticket.min_version} to {version}"
    if oldest == newest:
        return
    sampled = group.is_sampled
    owner, versions = np.repeat(np.arange(group.lengths.size), group.lengths)[sampled], group.versions[sampled]
    for place in np.flatnonzero((np.diff(versions) < 0) & (np.diff(owner) == 0)):
        yield (
            f"completion {owner[place]} has a token of version {versions[place]} and then one of version "
            f"{versions[place + 1]}: versions within a completion never fall, so these are not those that sampled it"
        )


def _score_problems(group: Group, components: Collection[str]) -> Iterator[str]:
    expected = set(components)
    for index, record in enumerate(group.trajectories):
        scored = record.status.is_scored
        if scored != (record.reward is not None):
            yield f"trajectory {index} is {record.status} with reward {record.reward}"
        if record.reward is not None and not math.isfinite(record.reward):
            yield f"trajectory {index} has reward {record.reward}"
        if not scored and not record.error_kind:
            yield f"trajectory {index} is {record.status} without an error kind"
        if record.rewards.keys() != expected if scored else record.rewards.keys() - expected:
            yield (
                f"trajectory {index} has the reward components {_named(record.rewards)}, here they are "
                f"{_named(components)}. Do both sides have the same reward.functions?"
            )
        if not all(map(math.isfinite, record.rewards.values())):
            yield f"trajectory {index} has a reward component that is not finite"


def _trace_problems(group: Group, traces: Mapping[str, TokenTrace]) -> Iterator[str]:
    if group.traces.keys() != traces.keys():
        yield (
            f"it has the traces {_named(group.traces)}, here they are {_named(traces)}. Do both sides have the same "
            "`algorithm` section?"
        )
        return
    ends = np.cumsum(group.lengths)[group.lengths > 0] - 1  # tokens that were no input
    for name, trace in traces.items():
        for part, rows in (
            ("prompt", group.traces[name].prompt),
            ("completions", np.delete(group.traces[name].completions, ends, axis=0)),
        ):
            if rows.shape[1] != trace.width:
                yield f"the trace {name} has {rows.shape[1]} bytes per token, here it has {trace.width}"
            elif problem := trace.problem(rows):
                yield f"the trace {name} of the {part}: {problem}"


def _named(components: Collection[str]) -> str:
    """List names that come from a peer, few and short."""
    names = sorted(printable(name, 50) for name in list(components)[:10])
    return ", ".join(names) + (f" and {len(components) - 10} more" if len(components) > 10 else "") or "none"
