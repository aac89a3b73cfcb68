"""Interface of inference engines, and the values that pass through it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import nan
from typing import Protocol

import numpy as np

from asyncrl.errors import BadStateError
from asyncrl.processing.encoded_prompt import EncodedPrompt
from protocol.messages import FinishReason, PartialRollout, Sampling, TokenTraces, TrajectoryRequest
from rollout_server.engines.arrived_weights import ArrivedWeights, ModelProcesses


class EngineDied(Exception):
    """The engine cannot sample any more (dead process or thread, or mixed weights of two versions).

    No ticket is to blame: the server ends with it, and its tickets go to its successor. The cause, where it is known,
    is the exception's.
    """


@dataclass(frozen=True)
class GenerationRequest:
    """Sample the completions `indices` of a prompt's group. Requests of one call differ in `request_id` or `stream`."""

    request_id: int
    prompt: EncodedPrompt
    """Prompt with its pixels where the engine takes them."""
    group_size: int
    seed: int
    sampling: Sampling
    requests: tuple[TrajectoryRequest, ...] = ()
    """One for each completion, or none: each begins with its request's prefix, and the most probable token follows each
    time where the request says greedy."""
    seen: Mapping[tuple[str, ...], EncodedPrompt] = field(default_factory=dict)
    """The prompt with the images that requests have in place of its own, by their content hashes."""
    partial: PartialRollout | None = None
    """Part that another server has sampled of the group: each completion begins with it, the given prefix included."""
    stream: tuple[int, ...] = ()
    """Index of the trajectory and number of the turn, of a request for a later turn; empty: the first turns of a group,
    whose indices are the completions' own."""

    def seed_of(self, index: int) -> tuple[int, ...]:
        """Seeds of the random stream of completion `index`."""
        return (self.seed, *(self.stream or (index,)))

    def images_of(self, index: int) -> tuple[str, ...]:
        """Content hashes of the images that completion `index` sees in place of the prompt's."""
        return self.requests[index].images if self.requests else ()

    def seen_by(self, index: int) -> EncodedPrompt:
        """Prompt of completion `index`."""
        images = self.images_of(index)
        return self.seen[images] if images else self.prompt

    def encoded_prompt(self, index: int) -> EncodedPrompt:
        """The prompt of a completion with its pixels. Raises BadStateError where it was only measured."""
        prompt = self.seen_by(index)
        if not prompt.has_pixels:
            raise BadStateError(f"ticket {self.request_id} came without pixels to an engine that takes them")
        return prompt

    def requested(self, index: int) -> tuple[int, ...]:
        """Token ids that its request puts at the beginning of completion `index`: no policy has sampled them."""
        return self.requests[index].prefix if self.requests else ()

    def prefix(self, index: int) -> tuple[int, ...]:
        """Token ids that completion `index` begins with: what its request puts there, and what was sampled before."""
        if self.partial is None or not self.partial.lengths[index]:
            return self.requested(index)
        return tuple(self.partial.token_ids[self.partial.span(index)].tolist())

    def sampling_of(self, index: int) -> Sampling:
        """How completion `index` is sampled: at temperature 0 where its request says greedy."""
        greedy = self.requests and self.requests[index].greedy
        return self.sampling.model_copy(update={"temperature": 0.0}) if greedy else self.sampling

    def finish_reason(self, token_ids: Sequence[int]) -> FinishReason | None:
        """Finish reason of a completion of these tokens, its prefix included; None: it goes on."""
        return self.sampling.finish_reason(token_ids)

    def whole(self, index: int, version: int) -> Completion | None:
        """Completion `index` where its prefix is all of it, put in place at `version`; None: the rest is sampled."""
        whole = self.begun(index, version)
        return whole if whole.finish_reason else None

    def begun(self, index: int, version: int) -> Completion:
        """Completion `index` as it is before anything of it is sampled here: its prefix, put in place at `version`."""
        prefix = self.prefix(index)
        return Completion(
            request_id=self.request_id,
            index=index,
            token_ids=np.asarray(prefix, np.int32),
            logprobs=np.zeros(len(prefix), np.float32),
            versions=np.full(len(prefix), version, np.int32),
            finish_reason=self.finish_reason(prefix),
            stream=self.stream,
        )


@dataclass(frozen=True)
class Completion:
    """One finished completion. Columns are [T]."""

    request_id: int
    index: int
    """Place within the group, 0 to group_size - 1."""
    token_ids: np.ndarray
    """int32, prefix and stop token included."""
    logprobs: np.ndarray
    """float32, of the sampling distribution; 0 in the prefix."""
    versions: np.ndarray
    """int32 policy version that sampled each token, contiguous and never falling; in the prefix the one that was
    current when it was put there."""
    finish_reason: FinishReason | None
    """None: it is not finished, and was asked back (`interrupt`)."""
    traces: Mapping[str, TokenTraces] = field(default_factory=dict)
    """Traces of the prompt's tokens and of these, by name, where the run asks for them and it has sampled any here."""
    stream: tuple[int, ...] = ()
    """The request's: it tells later turns of one ticket apart."""

    def behind(self, partial: PartialRollout) -> Completion:
        """Completion with log-probs and versions of tokens that were sampled elsewhere: the engine knows only the
        tokens of its prefix."""
        span = partial.span(self.index)
        place = slice(0, span.stop - span.start)
        logprobs, versions = self.logprobs.copy(), self.versions.copy()
        logprobs[place], versions[place] = partial.logprobs[span], partial.versions[span]
        return replace(self, logprobs=logprobs, versions=versions)


@dataclass(frozen=True)
class FailedRequest:
    """A request that could not be sampled, through a fault of its own: it gets no more completions."""

    request_id: int
    error: Exception
    stream: tuple[int, ...] = ()


def version_column(spans: Sequence[tuple[int, int, int]], length: int, engine: str) -> np.ndarray:
    """[T] int32 from an engine's own record of which weights sampled which tokens: version, first token, one past the
    last. Raises BadStateError unless it covers all of them in order."""
    column = np.empty(length, np.int32)
    covered = 0
    for version, start, end in spans:
        if start != covered or end < start:
            break
        column[start:end] = version
        covered = end
    if covered != length:
        raise BadStateError(
            f"{engine}'s record of weight versions {list(spans)} does not cover {length} tokens in order"
        )
    return column


@dataclass(frozen=True)
class EngineUsage:
    """Work of an engine since it started."""

    tokens_generated: int
    busy_s: float
    sequences_running: int
    update_pause_s: float = 0.0
    """Time for which weight updates paused running sequences."""
    sleep_bytes: int = 0
    """Bytes that left the device when the engine fell asleep last."""
    kv_cache_ratio: float = nan
    """Share of the key-value cache in use; NaN for an engine whose cache has no fixed size."""


class InferenceEngine(Protocol):
    """Life cycle: start, then generate and update_weights in any order, then close.

    `sleep`/`wake` give the device's memory away and take it back. Every method may be called from the event loop only.
    """

    name: str
    takes_pixels: bool
    """True if it computes from the pixels of its requests; else it makes them itself, or none, and nobody need."""
    processes: ModelProcesses | None
    """Processes of the model, once started, for channels between devices; None: no function of a plug-in runs there."""

    async def start(self) -> None: ...

    @property
    def architecture_fingerprint(self) -> str: ...

    @property
    def version(self) -> int:
        """Policy version that samples now."""
        ...

    @property
    def usage(self) -> EngineUsage: ...

    def check_alive(self) -> None:
        """Raise EngineDied if the engine has died; every other call, and those that run, then raise it, too."""
        ...

    def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Completion | FailedRequest]:
        """Admit the requests together and stream completions as they finish.

        A request that cannot be sampled fails alone: the others go on. What is raised concerns them all.

        Which random number draws a token depends only on its request's seed, the completion's index and the token's
        position: neither the other sequences nor weight updates change it. Closing the iterator early drops what
        still runs.
        """
        ...

    async def interrupt(self, request_ids: Collection[int]) -> None:
        """End these requests: `generate` yields what there is of each completion, finished or not.

        Later turns of conversations run on. Returns when nothing of them runs any more.
        """
        ...

    async def update_weights(self, version: int, weights: ArrivedWeights, /) -> None:
        """Sample every later token from these weights. Returns when they are in place.

        `rollout.weight_update` says what happens to the sequences that are running. An engine that failed half-way
        through holds a mixture of two policies: it samples no more.
        """
        ...

    async def sleep(self) -> None:
        """Finish running requests, then free the device memory of weights and caches. See rollout.sleep_level.

        Asleep, `sleep` and `update_weights` raise BadStateError, and what `generate` is given waits.
        """
        ...

    async def wake(self) -> None:
        """Take the device memory again; no-op if awake. After level 2 the weights come with the next `update_weights`,
        and nothing is sampled before.

        Raises BadStateError where there is no room, or where the model is not what it was.
        """
        ...

    async def close(self) -> None: ...
