"""The sequences that the `hf` engine decodes together: one left-padded key-value cache, and one row each.

Rows join and leave between decode steps. Keys are stored with their rotary positions already applied and
attention goes by mask, so the padding to the left of a row may grow and shrink freely.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import DynamicCache

from asyncrl.models.sampling_distribution import draw, gather_logprobs, sampling_logprobs, truncated_logprobs
from asyncrl.models.token_trace import Recorder
from asyncrl.processing.encoded_prompt import EncodedPrompt
from asyncrl.processing.model_inputs import media_inputs, prompt_positions
from protocol.messages import FinishReason, Sampling, TokenTraces
from rollout_server.engines.base import Completion, GenerationRequest
from rollout_server.engines.hf.growing_cache import GrowingCache

REBUILD_TOKENS = 8192
"""Largest number of tokens in one forward pass of a rebuild: it bounds the memory."""


@dataclass(frozen=True)
class Prefilled:
    """`R` prompts, left-padded to the longest one's `P` tokens."""

    logits: torch.Tensor
    """[R, V] that predict the first completion token."""
    cache: Any
    """transformers' cache; each layer's keys and values are [R, H, P, D]."""
    attention: torch.Tensor
    """[R, P] int64, 0 on padding."""
    next_positions: list[int]
    """Rotary position of each prompt's first completion token."""
    position_rows: int
    """3 for multimodal rotary positions, else 1."""


def prefill(model: Any, prompts: Sequence[EncodedPrompt], device: torch.device) -> Prefilled:
    """One forward pass over the prompts, their images and their videos."""
    placed = [prompt_positions(model, prompt) for prompt in prompts]
    longest = max(len(prompt.token_ids) for prompt in prompts)
    position_rows = len(placed[0][0])
    ids = torch.zeros((len(prompts), longest), dtype=torch.long)
    types, attention = torch.zeros_like(ids), torch.zeros_like(ids)
    positions = torch.zeros((position_rows, len(prompts), longest), dtype=torch.long)
    for row, (prompt, (places, _)) in enumerate(zip(prompts, placed, strict=True)):
        columns = slice(longest - len(prompt.token_ids), longest)
        ids[row, columns] = torch.from_numpy(prompt.token_ids)
        types[row, columns] = torch.from_numpy(prompt.token_types)
        attention[row, columns] = 1
        positions[:, row, columns] = places
    inputs: dict[str, torch.Tensor] = {"input_ids": ids, "attention_mask": attention}
    inputs["position_ids"] = positions if position_rows == 3 else positions[0]
    inputs |= media_inputs(model, prompts, types)
    inputs = {name: tensor.to(device) for name, tensor in inputs.items()}
    # Of every token, also in layers with a window: the model's own cache would drop what completions still see.
    output = model(**inputs, past_key_values=DynamicCache(), use_cache=True, logits_to_keep=1)
    next_positions = [position for _, position in placed]
    return Prefilled(
        output.logits[:, -1], output.past_key_values, inputs["attention_mask"], next_positions, position_rows
    )


@dataclass
class DecodeRow:
    """One sequence being decoded; its columns begin with its prefix and grow by one token per step."""

    request: GenerationRequest
    index: int
    sampling: Sampling
    next_position: int
    """Rotary position of its last token, which the next step feeds; before the prefill, from the end of the prompt."""
    uniforms: np.ndarray
    """[max_new_tokens] the one random number of each token, drawn in advance from the row's own stream."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    prompt_traces: dict[str, np.ndarray] = field(default_factory=dict)
    """[P, width] uint8 of its prompt, by name."""
    traces: dict[str, list[np.ndarray]] = field(default_factory=dict)
    """[width] uint8 of each token that the model has taken, by name."""

    @property
    def finish_reason(self) -> FinishReason | None:
        """None while it runs."""
        return self.request.finish_reason(self.token_ids)

    def completion(self) -> Completion:
        """Completion so far, finished or not."""
        return Completion(
            request_id=self.request.request_id,
            index=self.index,
            token_ids=np.asarray(self.token_ids, np.int32),
            logprobs=np.asarray(self.logprobs, np.float32),
            versions=np.asarray(self.versions, np.int32),
            finish_reason=self.finish_reason,
            traces={name: self._traces(name, prompt) for name, prompt in self.prompt_traces.items()},
            stream=self.request.stream,
        )

    def _traces(self, name: str, prompt: np.ndarray) -> TokenTraces:
        rows = np.zeros((len(self.token_ids), prompt.shape[1]), np.uint8)
        if known := self.traces.get(name):
            rows[: len(known)] = known
        return TokenTraces(prompt=prompt, completions=rows)


def new_rows(request: GenerationRequest, version: int) -> list[DecodeRow]:
    """The group's rows, each with a random stream that depends only on the ticket's seed and the row's index."""
    length = request.sampling.max_new_tokens
    rows: list[DecodeRow] = []
    for index in range(request.group_size):
        prefix = request.prefix(index)
        rows.append(
            DecodeRow(
                request=request,
                index=index,
                sampling=request.sampling_of(index),
                next_position=max(len(prefix) - 1, 0),
                uniforms=np.random.default_rng(request.seed_of(index)).random(length),
                token_ids=list(prefix),
                logprobs=[0.0] * len(prefix),
                versions=[version] * len(prefix),
            )
        )
    return rows


@dataclass(frozen=True)
class Joining:
    """Prefilled rows that are not in the batch yet, each with its first token or its prefix."""

    rows: list[DecodeRow]
    done: list[DecodeRow]
    """Rows of the same requests whose prefix is the whole completion."""
    prefilled: Prefilled | None
    """None where all are done."""
    which: torch.Tensor
    """[N] each row's prompt in `prefilled`."""

    @property
    def num_sampled(self) -> int:
        """Number of tokens that were sampled for it."""
        return sum(not row.request.prefix(row.index) for row in self.rows)


class DecodeBatch:
    """All sequences in flight. Not thread-safe: the engine's decode thread owns it."""

    def __init__(
        self,
        model: Any,
        banned_token_ids: Sequence[int],
        device: torch.device,
        recorders: Mapping[str, Recorder] | None = None,
    ):
        """`recorders`: of the traces that completions are to have."""
        self.model = model
        self._recorders = recorders or {}
        self.device = device
        self.banned = torch.tensor(sorted(banned_token_ids), dtype=torch.long, device=device)
        self.rows: list[DecodeRow] = []
        self._position_rows = 1
        self._cache = GrowingCache()
        self._attention = torch.zeros((0, 0), dtype=torch.long, device=device)

    @torch.inference_mode()
    def prefill(self, requests: Sequence[GenerationRequest], version: int) -> Joining:
        """Compute each prompt once, share it among the group's rows, feed their prefixes, or sample their first tokens.

        The batch stays as it is, whatever happens, until `join`.
        """
        everyone = [row for request in requests for row in new_rows(request, version)]
        done = [row for row in everyone if row.finish_reason]
        rows = [row for row in everyone if not row.finish_reason]
        if not rows:
            return Joining([], done, None, torch.zeros(0, dtype=torch.long, device=self.device))
        prefilled, prompts = self._prefill_prompts(rows)
        for row, prompt in zip(rows, prompts, strict=True):
            row.next_position += prefilled.next_positions[prompt]
        which = torch.tensor(prompts, device=self.device)
        first = [number for number, row in enumerate(rows) if not row.token_ids]
        if len(first) == len(rows):
            self._sample(prefilled.logits[which], rows, version)
            return Joining(rows, done, prefilled, which)
        if first:
            self._sample(prefilled.logits[which[first]], [rows[number] for number in first], version)
        beside = DecodeBatch(self.model, (), self.device, self._recorders)
        beside.rows = rows
        beside._add(prefilled, which)
        beside._feed_tokens()
        return Joining(rows, done, beside._prefilled(prefilled.logits), torch.arange(len(rows), device=self.device))

    def _prefilled(self, logits: torch.Tensor) -> Prefilled:
        """All rows of this batch, which is over, for another one."""
        layers = [SimpleNamespace(keys=layer.keys, values=layer.values) for layer in self._cache.layers]
        return Prefilled(logits, SimpleNamespace(layers=layers), self._attention, [], self._position_rows)

    def _prefill_prompts(self, rows: Sequence[DecodeRow]) -> tuple[Prefilled, list[int]]:
        """Compute each distinct prompt of [N] rows once, with its images. Returns them, and [N] which is each row's."""
        keys = [(id(row.request), row.request.images_of(row.index)) for row in rows]
        distinct: dict[Any, EncodedPrompt] = {}
        for key, row in zip(keys, rows, strict=True):
            if key not in distinct:
                distinct[key] = row.request.encoded_prompt(row.index)
        place = {key: number for number, key in enumerate(distinct)}
        prefilled = prefill(self.model, list(distinct.values()), self.device)
        prompts, found = [place[key] for key in keys], self._recorded(len(distinct))
        for name, traces in found.items():
            for row, prompt in zip(rows, prompts, strict=True):
                length = len(row.request.seen_by(row.index).token_ids)
                row.prompt_traces.setdefault(name, traces[prompt, traces.shape[1] - length :])
        return prefilled, prompts

    def _recorded(self, rows: int) -> dict[str, np.ndarray]:
        """[rows, M, width] of the last forward pass, by name."""
        found = {name: recorder() for name, recorder in self._recorders.items()}
        return {name: traces.view(rows, -1, traces.shape[1]).cpu().numpy() for name, traces in found.items()}

    @torch.inference_mode()
    def join(self, joining: Joining) -> list[DecodeRow]:
        """Decode these rows with the others from now on. Returns those that are finished already."""
        if joining.prefilled is None:
            return joining.done
        self._add(joining.prefilled, joining.which)
        self.rows = self.rows + joining.rows
        return joining.done + self._remove_finished()

    def _add(self, prefilled: Prefilled, which: torch.Tensor) -> None:
        """Add attention and cache of prefilled prompts; `which` [N] of them, one for each row."""
        self._position_rows = prefilled.position_rows
        attention = prefilled.attention[which]
        width = max(self._attention.shape[1], attention.shape[1])
        self._attention = torch.cat([_pad_left(self._attention, width), _pad_left(attention, width)])
        self._cache.join(prefilled.cache, which, width)

    @torch.inference_mode()
    def step(self, version: int) -> list[DecodeRow]:
        """One decode step: one more token for every row. Returns the rows that finished, and drops them."""
        columns = self._to_device([[row.token_ids[-1], row.next_position] for row in self.rows])
        grown = torch.ones((len(self.rows), 1), dtype=torch.long, device=self.device)
        self._attention = torch.cat([self._attention, grown], dim=1)
        ids, positions = columns.long().split(1, dim=1)
        logits = self._forward(ids, positions, self._attention)
        self._keep_traces([len(row.token_ids) - 1 for row in self.rows])
        self._sample(logits, self.rows, version)
        for row in self.rows:
            row.next_position += 1
        return self._remove_finished()

    def _to_device(self, table: list[list[float]]) -> torch.Tensor:
        """[N, K] float64, in one copy that nothing waits for."""
        host = torch.tensor(table, dtype=torch.float64, pin_memory=self.device.type == "cuda")
        return host.to(self.device, non_blocking=True)

    def resume(self, rows: list[DecodeRow]) -> None:
        """Decode rows of a batch in which a step failed, instead of those of this one."""
        self.rows = rows
        self.rebuild_cache()

    @torch.inference_mode()
    def rebuild_cache(self) -> None:
        """Compute every running row's keys and values again with the weights as they are now.

        Each distinct prompt passes the model once, with its images; its rows then feed what they have. The last token
        is not in the cache yet: the next step feeds it.
        """
        self._clear()  # two caches would not fit where one just does
        prefilled, prompts = self._prefill_prompts(self.rows)
        self._add(prefilled, torch.tensor(prompts, device=self.device))
        self._feed_tokens()

    def _feed_tokens(self) -> None:
        """Append all tokens of the completions but each row's last to the cache."""
        fed = [row.token_ids[:-1] for row in self.rows]
        longest = max(len(ids) for ids in fed)
        if longest == 0:
            return
        ids = torch.zeros((len(self.rows), longest), dtype=torch.long)
        positions = torch.zeros_like(ids)
        real = torch.zeros_like(ids)
        for number, (row, tokens) in enumerate(zip(self.rows, fed, strict=True)):
            end = len(tokens)  # padding comes behind: a window counts columns, and begins before the prompt's end
            ids[number, :end] = torch.tensor(tokens, dtype=torch.long)
            positions[number, :end] = torch.arange(row.next_position - end, row.next_position)
            real[number, :end] = 1
        ids, positions, real = ids.to(self.device), positions.to(self.device), real.to(self.device)
        width = max(1, REBUILD_TOKENS // len(self.rows))
        for start in range(0, longest, width):
            piece = slice(start, start + width)
            self._attention = torch.cat([self._attention, real[:, piece]], dim=1)
            self._forward(ids[:, piece], positions[:, piece], self._attention)
            self._keep_traces([start] * len(self.rows), [len(tokens) for tokens in fed])
        self._close_gaps()

    def _keep_traces(self, places: Sequence[int], ends: Sequence[int] | None = None) -> None:
        """Keep the traces of the last forward pass, over each row's tokens from its place on, and before its end. Those
        that a row has are of the pass that predicted from these tokens: they stay."""
        for name, traces in self._recorded(len(self.rows)).items():
            for row, found, place, end in zip(self.rows, traces, places, ends or [p + 1 for p in places], strict=True):
                known = row.traces.setdefault(name, [])
                known.extend(found[max(0, len(known) - place) : max(0, end - place)])

    def _close_gaps(self) -> None:
        """Move the padding behind a completion to the left of the prompt."""
        order = self._attention.argsort(dim=1, stable=True)  # zeros first; the real columns keep their order
        order = order[:, self._unused(self._attention.gather(1, order)) :]
        self._attention = self._attention.gather(1, order)
        self._cache.reorder(order)

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor, attention: torch.Tensor) -> torch.Tensor:
        """[N, M] tokens and positions on top of the cache, [N, W + M] attention -> [N, V] logits of the last token."""
        output = self.model(
            input_ids=ids,
            attention_mask=attention,
            position_ids=positions[None].expand(3, -1, -1) if self._position_rows == 3 else positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1]

    def _sample(self, logits: torch.Tensor, rows: Sequence[DecodeRow], version: int) -> None:
        """Append one token to each row: the inverse of the cumulative distribution at the row's random number.

        One copy brings what a step needs to the device and one copy its result back: only that one is waited for.
        """
        sampling = [row.sampling for row in rows]
        temperatures, uniforms = self._to_device(
            [[row.sampling.temperature, row.uniforms[len(row.token_ids)]] for row in rows]
        ).unbind(1)
        greedy = temperatures == 0
        divisors = temperatures.float().masked_fill(greedy, 1.0)
        logprobs = sampling_logprobs(logits, temperature=divisors, banned=self.banned)
        self._truncate(logprobs, sampling)
        tokens = draw(logprobs, uniforms)
        if any(each.temperature == 0 for each in sampling):
            tokens = torch.where(greedy, logprobs.argmax(-1), tokens)
        chosen = gather_logprobs(logprobs, tokens)
        sampled = torch.stack([tokens.double(), chosen.double()], dim=1).tolist()  # both are exact in float64
        for row, (token, logprob) in zip(rows, sampled, strict=True):
            row.token_ids.append(int(token))
            row.logprobs.append(logprob)
            row.versions.append(version)

    def _truncate(self, logprobs: torch.Tensor, sampling: Sequence[Sampling]) -> None:
        """Truncate the rows that ask for it, in place: the others stay as they are, bit for bit.

        Greedy decoding cuts nothing off: its log-probs are those of temperature 1, in the vllm engine, too.
        """
        rows = [number for number, s in enumerate(sampling) if s.truncates and s.temperature]
        if not rows:
            return
        columns = [[getattr(sampling[number], name) for number in rows] for name in ("top_k", "top_p", "min_p")]
        top_k, top_p, min_p = (torch.tensor(c, dtype=torch.float64, device=self.device) for c in columns)
        logprobs[rows] = truncated_logprobs(logprobs[rows], top_k=top_k, top_p=top_p, min_p=min_p)

    def _remove_finished(self) -> list[DecodeRow]:
        done = [row for row in self.rows if row.finish_reason]
        if done:
            self.keep(lambda row: row.finish_reason is None)
        return done

    def keep(self, wanted: Callable[[DecodeRow], bool]) -> None:
        """Drop the other rows and their part of the cache."""
        kept = [number for number, row in enumerate(self.rows) if wanted(row)]
        if kept:
            index = torch.tensor(kept, device=self.device, dtype=torch.long)
            unused = self._unused(self._attention[index])
            self._cache.keep(index, unused)
            self._attention = self._attention[index, unused:]
        else:
            self._clear()
        self.rows = [self.rows[number] for number in kept]  # last: should this fail, none is lost

    def _clear(self) -> None:
        """Free the cache."""
        self._cache, self._attention = GrowingCache(), self._attention[:0, :0]

    def _unused(self, attention: torch.Tensor) -> int:
        """Number of columns left of every row's first token."""
        return int(attention.argmax(dim=1).min())


def _pad_left(attention: torch.Tensor, width: int) -> torch.Tensor:
    """[N, W] with zeros on the left until it is [N, width]."""
    return torch.nn.functional.pad(attention, (width - attention.shape[1], 0))
