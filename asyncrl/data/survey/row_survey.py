"""The survey of a data source: each row is read, rendered and measured once, before a run begins.

Whatever reading, the template or the processor raises about a row makes it a *bad row*; so do a prompt over
data.max_prompt_length, a missing answer where other rows have one, and what no message to a rollout server can
hold. Which rows are bad depends on nothing but the rows and the settings: a run that resumes or is
replayed has the same rows, in the same order.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Literal

import xxhash

from asyncrl.config.sections import DataConfig
from asyncrl.data.dataset import RowSource
from asyncrl.data.images import decode_image
from asyncrl.data.prompts import PromptRenderer, RenderedPrompt
from asyncrl.data.survey.survey_cache import RowFacts, SurveyCache
from asyncrl.errors import BadStateError, UserError
from asyncrl.processing.encoded_prompt import EncodedPrompt
from asyncrl.processing.processor import PromptProcessor
from protocol.codec import MIB, Limits, decode, encode
from protocol.errors import ErrorCode, ProtocolError
from protocol.messages import Sampling, Ticket, TicketKind, Tickets
from protocol.values import pack_values

logger = logging.getLogger(__name__)

ROWS_AT_ONCE = 64
"""Rows in memory at a time, with their encoded images."""
MOST_THREADS = 16
PROGRESS_S = 10.0
KEEP_EVERY_S = 60.0
MOST_NAMED = 5
"""Bad rows in one message; bad_rows.jsonl has all of them."""
RowCheck = Callable[[RenderedPrompt], object]
"""Raises UserError where the row has no target that can be used."""
_SAMPLING_BYTES = 4096
"""Header bytes kept for a ticket's stop ids and banned ids, which a survey does not know."""


@dataclass(frozen=True)
class BadRow:
    source: str
    """`training` or `held-out`"""
    row_id: str
    """`<file or data set>:<index in it>`"""
    reason: str
    """The error, which names the row and says what is wrong."""


@dataclass(frozen=True)
class RowSurvey:
    """Findings in the rows of one source."""

    source: str
    row_ids: Callable[[int], str] = field(repr=False)
    facts: list[RowFacts | None]
    """Facts of each row; None for one that was refused, or not looked at."""
    refused: dict[int, str]
    """Errors by index of row, of those that cannot be used whatever the limit is."""
    overlong: Mapping[int, str]
    """Errors by index of row, of those over data.max_prompt_length."""
    seconds: float
    """Time that it took; 0 where all of it was remembered."""

    @property
    def usable(self) -> list[int]:
        return [i for i, facts in enumerate(self.facts) if facts and i not in self.overlong]

    @property
    def num_without_target(self) -> int:
        """Number of usable rows without a text in `data.target_key`."""
        return sum(not facts.has_target for index in self.usable if (facts := self.facts[index]))

    @property
    def num_looked_at(self) -> int:
        """Number of rows that were looked at: all, or a sample."""
        return sum(facts is not None for facts in self.facts) + len(self.refused)

    def fingerprint(self, *parts: Literal["index", "prompt", "rest"]) -> str:
        """Hash of these parts of the usable rows."""
        hashed = xxhash.xxh3_64()
        for index in self.usable:
            facts = self.facts[index]
            hashed.update(repr([index if part == "index" else getattr(facts, part) for part in parts]).encode())
        return hashed.hexdigest()

    def digests(self) -> bytes:
        """Hash of 8 bytes of each usable row, in their order: of its prompt, answer and other columns."""
        known = (self.facts[index] for index in self.usable)
        return b"".join(xxhash.xxh3_64_digest(f"{facts.prompt} {facts.rest}".encode()) for facts in known if facts)

    def changed_since(self, before: bytes) -> str:
        """Name the first rows whose digests differ; empty where that cannot be told, as with another number of rows."""
        now, usable = self.digests(), self.usable
        places = range(0, len(now), 8) if len(now) == len(before) else range(0)
        changed = [usable[at // 8] for at in places if now[at : at + 8] != before[at : at + 8]]
        more = f" and {len(changed) - MOST_NAMED:,} more" if len(changed) > MOST_NAMED else ""
        return f"{', '.join(map(self.row_ids, changed[:MOST_NAMED]))}{more}"

    def shared_with(self, other: RowSurvey) -> list[tuple[int, int]]:
        """Index of each prompt that the other source has, too, and its index there."""
        theirs = {facts.prompt: index for index, facts in enumerate(other.facts) if facts}
        ours = {facts.prompt: index for index, facts in enumerate(self.facts) if facts}
        return [(index, theirs[prompt]) for prompt, index in ours.items() if prompt in theirs]

    def leaves_out(self, config: DataConfig) -> bool:
        """True if bad rows are left out; False if they keep a run from beginning, as `stop` and no usable row do."""
        return config.on_bad_row == "skip" and bool(self.usable)

    def check(self, config: DataConfig, also_bad: Mapping[int, str] | None = None) -> None:
        """Log bad rows, those among them that are `also_bad`, with reasons. Raises UserError where they keep a run from
        beginning."""
        for index, reason in (also_bad or {}).items():
            self.facts[index], self.refused[index] = None, reason
        if problem := self.describe_bad():
            if not self.leaves_out(config):
                raise UserError(problem)
            logger.warning("left out (data.on_bad_row=skip): %s", problem)

    def describe_bad(self) -> str:
        """Count the bad rows and name the first; empty if there are none."""
        bad, looked_at = self.bad, self.num_looked_at
        if not bad:
            return ""
        counted = f"{len(bad):,} of " if len(bad) < looked_at else "none of "
        verb = "cannot" if len(bad) < looked_at else "can"
        whole = "" if looked_at == len(self.facts) else f" of {len(self.facts):,} (a sample)"
        named = [f"- {one.reason}" for one in bad[:MOST_NAMED]]
        more = [f"and {len(bad) - MOST_NAMED:,} more"] if len(bad) > MOST_NAMED else []
        return "\n".join([f"{counted}{looked_at:,} {self.source} rows{whole} {verb} be used:", *named, *more])

    @property
    def bad(self) -> list[BadRow]:
        """Bad rows in their order."""
        reasons = sorted({**self.refused, **self.overlong}.items())
        return [BadRow(self.source, self.row_ids(i), reason) for i, reason in reasons]


def overlong_opening(prompt: EncodedPrompt, limit: float) -> str:
    """Describe a prompt that what an environment opens with has made longer than the limit."""
    return (
        f"row {prompt.row_id}: with what the environment's reset() opens with the prompt has {len(prompt.token_ids)} "
        f"tokens ({prompt.media_tokens} of them for images and videos), over data.max_prompt_length = {limit}. "
        "Raise the limit, or open with less text and smaller images (environment.limits.image_pixels)"
    )


@contextmanager
def named_errors(row_id: str) -> Iterator[None]:
    """Raise whatever is raised about a row as a UserError that names it, and a disk that fails as BadStateError."""
    try:
        yield
    except (UserError, BadStateError, MemoryError):
        raise
    except Exception as error:  # a template, a decoder and a processor may raise anything
        what = " ".join(f"{type(error).__name__}: {error}".split())
        if isinstance(error, OSError) and error.errno:
            raise BadStateError(f"row {row_id} cannot be read: {what}. The disk fails, not the row") from error
        raise UserError(f"row {row_id}: it cannot be made a prompt ({what}). Fix the row or leave it out") from error


def check_message(rendered: RenderedPrompt, most_mib: int) -> None:
    """Raise UserError naming the row unless a message of at most so many MiB brings it to a rollout server.

    A message is encoded, and decoded as the server will: so nothing can be refused there.
    """
    limits = Limits(max_message_bytes=most_mib * MIB)
    room = Limits(limits.max_message_bytes - _SAMPLING_BYTES, limits.max_header_bytes - _SAMPLING_BYTES)
    prompt, images = rendered.prompt, sum(map(len, rendered.blobs.values()))
    ticket = Ticket(
        ticket_id=0,
        kind=TicketKind.TRAIN,
        prompt=prompt,
        group_size=1,
        seed=0,
        min_version=0,
        sampling=Sampling(max_new_tokens=1, stop_token_ids=()),
    )
    blobs = {digest: memoryview(data) for digest, data in rendered.blobs.items()}
    header_bytes = 0
    try:
        frames = encode(Tickets(tickets=(ticket,), blobs=blobs))
        header_bytes = len(frames[0])
        decode(frames, Tickets, room)
    except ProtocolError as problem:
        if problem.code is not ErrorCode.TOO_LARGE:
            raise UserError(
                f"row {prompt.row_id} cannot be sent to a rollout server: {problem.reason}. Leave out what the reward "
                "does not need"
            ) from problem
        raise UserError(
            f"row {prompt.row_id} is too large to be sent to a rollout server: {len(blobs)} images, "
            f"{images / MIB:.1f} MiB, and {header_bytes / MIB:.1f} MiB of text and columns; a message takes "
            f"{limits.max_frames - 1:,} images, {most_mib} MiB (network.max_message_mib), and "
            f"{limits.max_header_bytes / MIB:.0f} MiB of text and columns. Leave out what the reward does not need"
        ) from problem


def facts_of(rendered: RenderedPrompt, measured: EncodedPrompt) -> RowFacts:
    prompt = xxhash.xxh3_64(measured.token_ids.tobytes())
    prompt.update("\0".join((*measured.image_hashes, *measured.video_hashes)).encode())
    row = rendered.prompt
    rest = xxhash.xxh3_64(pack_values([row.answer, sorted(row.columns.items()), rendered.target]))
    return RowFacts(
        len(measured.token_ids),
        measured.media_tokens,
        prompt.hexdigest(),
        rest.hexdigest(),
        has_answer=row.answer is not None,
        has_target=bool(rendered.target),
    )


class PromptRows:
    """Rows of one source, and the prompts that a run makes of them."""

    def __init__(
        self,
        rows: RowSource,
        data: DataConfig,
        processor: PromptProcessor,
        max_message_mib: int,
        source: str = "training",
        check: RowCheck | None = None,
    ):
        """`source` is `training` or `held-out`. `check` is given for supervised training, where rows need targets, but
        no answers, and are sent to nobody."""
        self.rows = rows
        self.source = source
        self._data = data
        self._processor = processor
        self._max_message_mib = max_message_mib
        self._check = check
        self._renderer = PromptRenderer(data)
        self._reading = Lock()

    def render(self, index: int) -> RenderedPrompt:
        """Raises UserError as `PromptRenderer.render` does."""
        return self._renderer.render(self.rows[index], self.rows.row_id(index))

    def measure(self, index: int) -> tuple[RenderedPrompt, EncodedPrompt]:
        """Read, render and measure a row. Raises UserError naming it, whatever is wrong but the pixels of an image."""
        row_id = self.rows.row_id(index)
        with named_errors(row_id):
            rendered = self.render(index)
            measured = self._processor.measure(rendered.prompt, rendered.blobs)
            check_message(rendered, self._max_message_mib)
        if len(measured.token_ids) > self._data.max_prompt_length:
            raise UserError(self._overlong(row_id, len(measured.token_ids), measured.media_tokens))
        return rendered, measured

    def usable(self) -> RowSurvey:
        """Survey all rows for a run. Raises UserError naming rows if none is usable, or one is bad under `stop`."""
        survey = self.survey()
        survey.check(self._data)
        return survey

    def survey(self, sample: int = 0) -> RowSurvey:
        """Look at every row, several at a time, or take what is remembered of an earlier survey.

        With a `sample`, look at so many of the rows that are not remembered, spread evenly. What is found is kept now
        and then: a survey that is broken off goes on where it was. Rows that were refused are looked at again each
        time: what is wrong may be a file that lies elsewhere. Images are decoded, so that a damaged one is found here
        and not by a rollout server.
        """
        began = time.monotonic()
        checked_mib = self._max_message_mib if self._check is None else None
        cache = SurveyCache.of(self.rows, self._processor, self._data, checked_mib)
        facts: list[RowFacts | None] = cache.load() or [None] * len(self.rows)
        missing = [index for index, known in enumerate(facts) if known is None]
        if sample:
            missing = missing[:: max(1, -(-len(missing) // sample))]  # none, where a survey was broken off at its end
        refused: dict[int, str] = {}
        reported = kept = began
        with ThreadPoolExecutor(min(MOST_THREADS, len(os.sched_getaffinity(0))), "survey") as pool:
            for first in range(0, len(missing), ROWS_AT_ONCE):
                indices = missing[first : first + ROWS_AT_ONCE]
                for index, (row, found) in zip(indices, pool.map(self._look_at, indices), strict=True):
                    if isinstance(found, UserError):
                        refused[index] = str(found)
                    else:
                        facts[index] = found
                        cache.note_files(row)
                if time.monotonic() - reported > PROGRESS_S:
                    reported = time.monotonic()
                    done = first + len(indices)
                    left = (reported - began) / done * (len(missing) - done)
                    logger.info("%d of %d rows are measured, about %.0f s are left", done, len(missing), left)
                if time.monotonic() - kept > KEEP_EVERY_S:
                    kept = time.monotonic()
                    cache.save(facts, kept - began)
        seconds = time.monotonic() - began if missing else 0.0
        cache.save(facts, seconds)
        return self._judged(facts, refused, seconds)

    def _look_at(self, index: int) -> tuple[Mapping[str, Any], RowFacts | UserError]:
        """Read and examine a row; several threads do it at once."""
        row: Mapping[str, Any] = {}
        row_id = self.rows.row_id(index)
        try:
            with named_errors(row_id):
                with self._reading:
                    row = self.rows[index]
                return row, self._examine(row, row_id)
        except UserError as error:
            return row, error

    def _examine(self, row: Mapping[str, Any], row_id: str) -> RowFacts:
        rendered = self._renderer.render(row, row_id)
        measured = self._processor.measure(rendered.prompt, rendered.blobs)
        for number, digest in enumerate(rendered.prompt.image_hashes):
            decode_image(rendered.blobs[digest], f"row {row_id}, image {number}")
        if self._check is None:
            check_message(rendered, self._max_message_mib)
        else:
            self._check(rendered)
        return facts_of(rendered, measured)

    def _judged(self, facts: list[RowFacts | None], refused: dict[int, str], seconds: float) -> RowSurvey:
        """Judge what is known of all rows: rows without an answer beside others that have one, and overlong ones."""
        if self.rows.purpose == "rl" and any(known and known.has_answer for known in facts):
            for index, known in enumerate(facts):
                if known and not known.has_answer:
                    refused[index], facts[index] = self._unanswered(self.rows.row_id(index)), None
        overlong = {
            index: self._overlong(self.rows.row_id(index), known.tokens, known.media_tokens)
            for index, known in enumerate(facts)
            if known and known.tokens > self._data.max_prompt_length
        }
        return RowSurvey(self.source, self.rows.row_id, facts, refused, overlong, seconds)

    def _unanswered(self, row_id: str) -> str:
        return (
            f"row {row_id}: there is no answer in column {self._data.answer_key!r} (data.answer_key), and other rows "
            "have one. Give it one or leave it out"
        )

    def _overlong(self, row_id: str, tokens: int, media_tokens: int) -> str:
        """Describe a prompt over the limit. A prompt with images is never cut: that would cut image tokens."""
        fixes = ["Raise the limit"]
        text_tokens = tokens - media_tokens
        if text_tokens < min(media_tokens, self._data.max_prompt_length):
            fixes.append("lower model.max_pixels for smaller images")
        if self._processor.shown_tools is not None:
            fixes.append("give the environment fewer tools or shorter docstrings, whose schemas are in each prompt")
        if len(fixes) == 1:
            fixes.append("shorten the text")
        return (
            f"row {row_id}: the prompt has {tokens} tokens ({media_tokens} of them for images and videos), over "
            f"data.max_prompt_length = {self._data.max_prompt_length}. {', or '.join(fixes)}"
        )
