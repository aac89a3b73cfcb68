"""The sequences that the `hf` engine decodes together: one left-padded key-value cache, and one row each.

Rows join and leave between decode steps. Keys are stored with their rotary positions already applied and
attention goes by mask, so the padding to the left of a row may grow and shrink freely.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from asyncrl.models.positions import prompt_positions
from asyncrl.models.sampling_distribution import gather_logprobs, sampling_logprobs
from protocol.messages import FinishReason
from rollout_server.engines.base import Completion, GenerationRequest


@dataclass
class DecodeRow:
    """One sequence being decoded; its sampled columns grow by one token per step."""

    request: GenerationRequest
    index: int
    next_position: int
    uniforms: np.ndarray
    """[max_new_tokens] the one random number of each token, drawn in advance from the row's own stream."""
    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]

    @property
    def finish_reason(self) -> FinishReason | None:
        sampling = self.request.sampling
        if self.token_ids and self.token_ids[-1] in sampling.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.token_ids) >= sampling.max_new_tokens else None

    def completion(self, reason: FinishReason) -> Completion:
        return Completion(
            request_id=self.request.request_id,
            index=self.index,
            token_ids=np.asarray(self.token_ids, np.int32),
            logprobs=np.asarray(self.logprobs, np.float32),
            versions=np.asarray(self.versions, np.int32),
            finish_reason=reason,
        )


def new_rows(request: GenerationRequest, next_position: int) -> list[DecodeRow]:
    """The group's rows, each with a random stream that depends only on the ticket's seed and the row's index."""
    length = request.sampling.max_new_tokens
    return [
        DecodeRow(
            request=request,
            index=index,
            next_position=next_position,
            uniforms=np.random.default_rng((request.seed, index)).random(length),
            token_ids=[],
            logprobs=[],
            versions=[],
        )
        for index in range(request.group_size)
    ]


class DecodeBatch:
    """All sequences in flight. Not thread-safe: the engine's decode thread owns it."""

    def __init__(self, model: Any, banned_token_ids: Sequence[int], device: torch.device):
        self.model = model
        self.device = device
        self.banned = torch.tensor(sorted(banned_token_ids), dtype=torch.long, device=device)
        self.rows: list[DecodeRow] = []
        self._position_rows = 1
        self._cache: Any = None
        self._attention = torch.zeros((0, 0), dtype=torch.long, device=device)

    @torch.inference_mode()
    def admit(self, requests: Sequence[GenerationRequest], version: int) -> list[Completion]:
        """Prefill each prompt once, share it among the group's rows, sample their first tokens.

        Returns completions that are already finished.
        """
        logits, cache, attention, next_positions = self._prefill(requests)
        copies = torch.tensor([request.group_size for request in requests], device=self.device)
        which = torch.repeat_interleave(torch.arange(len(requests), device=self.device), copies)
        cache.batch_select_indices(which)
        rows = [
            row
            for request, position in zip(requests, next_positions, strict=True)
            for row in new_rows(request, position)
        ]
        self._sample(logits[which], rows, version)
        self._merge(rows, cache, attention[which])
        return self._remove_finished()

    @torch.inference_mode()
    def step(self, version: int) -> list[Completion]:
        """One decode step: one more token for every row. Returns the rows that finished, and drops them."""
        inputs = torch.tensor([[row.token_ids[-1]] for row in self.rows], device=self.device)
        grown = torch.ones((len(self.rows), 1), dtype=torch.long, device=self.device)
        self._attention = torch.cat([self._attention, grown], dim=1)
        positions = torch.tensor([row.next_position for row in self.rows], device=self.device)[:, None]
        if self._position_rows == 3:
            positions = positions[None].expand(3, -1, -1)
        output = self.model(
            input_ids=inputs,
            attention_mask=self._attention,
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
        )
        for row in self.rows:
            row.next_position += 1
        self._sample(output.logits[:, -1], self.rows, version)
        return self._remove_finished()

    def _prefill(self, requests: Sequence[GenerationRequest]) -> tuple[torch.Tensor, Any, torch.Tensor, list[int]]:
        """-> last logits [R, V], cache, attention mask [R, P], position of each prompt's first new token."""
        prompts = [request.prompt for request in requests]
        longest = max(len(prompt.token_ids) for prompt in prompts)
        placed = [prompt_positions(self.model, prompt) for prompt in prompts]
        self._position_rows = placed[0][0].shape[0]
        ids = torch.zeros((len(prompts), longest), dtype=torch.long)
        types = torch.zeros_like(ids)
        attention = torch.zeros_like(ids)
        positions = torch.zeros((self._position_rows, len(prompts), longest), dtype=torch.long)
        for row, (prompt, (place, _)) in enumerate(zip(prompts, placed, strict=True)):
            start = longest - len(prompt.token_ids)
            ids[row, start:] = torch.from_numpy(prompt.token_ids)
            types[row, start:] = torch.from_numpy(prompt.token_types)
            attention[row, start:] = 1
            positions[:, row, start:] = place
        inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": attention}
        inputs["position_ids"] = positions if self._position_rows == 3 else positions[0]
        pixels = [prompt.pixel_values for prompt in prompts if prompt.pixel_values is not None]
        if pixels:
            inputs["pixel_values"] = torch.cat(pixels)
            inputs["image_grid_thw"] = torch.from_numpy(np.concatenate([p.image_grids for p in prompts])).long()
            inputs["mm_token_type_ids"] = types
        inputs = {name: tensor.to(self.device) for name, tensor in inputs.items()}
        output = self.model(**inputs, use_cache=True, logits_to_keep=1)
        return output.logits[:, -1], output.past_key_values, inputs["attention_mask"], [p for _, p in placed]

    def _sample(self, logits: torch.Tensor, rows: Sequence[DecodeRow], version: int) -> None:
        """Append one token to each row: the inverse of the cumulative distribution at the row's random number."""
        sampling = [row.request.sampling for row in rows]
        temperatures = torch.tensor([s.temperature or 1.0 for s in sampling], device=self.device)
        logprobs = sampling_logprobs(logits, temperature=temperatures, banned=self.banned)
        cumulative = logprobs.exp().double().cumsum(-1)
        uniforms = torch.tensor([row.uniforms[len(row.token_ids)] for row in rows], device=self.device)
        drawn = torch.searchsorted(cumulative, (uniforms * cumulative[:, -1])[:, None], right=True).squeeze(-1)
        greedy = torch.tensor([s.temperature == 0 for s in sampling], device=self.device)
        tokens = torch.where(greedy, logprobs.argmax(-1), drawn.clamp_max(logprobs.shape[-1] - 1))
        chosen = gather_logprobs(logprobs, tokens)
        for row, token, logprob in zip(rows, tokens.tolist(), chosen.tolist(), strict=True):
            row.token_ids.append(token)
            row.logprobs.append(logprob)
            row.versions.append(version)

    def _merge(self, rows: list[DecodeRow], cache: Any, attention: torch.Tensor) -> None:
        if not self.rows:
            self.rows, self._cache, self._attention = rows, cache, attention
            return
        width = max(self._attention.shape[1], attention.shape[1])
        self._attention = torch.cat([_pad_left(self._attention, width, 1), _pad_left(attention, width, 1)])
        for mine, theirs in zip(self._cache.layers, cache.layers, strict=True):
            mine.keys = torch.cat([_pad_left(mine.keys, width, 2), _pad_left(theirs.keys, width, 2)])
            mine.values = torch.cat([_pad_left(mine.values, width, 2), _pad_left(theirs.values, width, 2)])
        self.rows = self.rows + rows

    def _remove_finished(self) -> list[Completion]:
        reasons = [row.finish_reason for row in self.rows]
        done = [row.completion(reason) for row, reason in zip(self.rows, reasons, strict=True) if reason]
        if done:
            self._keep([i for i, reason in enumerate(reasons) if reason is None])
        return done

    def _keep(self, kept: list[int]) -> None:
        self.rows = [self.rows[i] for i in kept]
        if not kept:
            self._cache, self._attention = None, self._attention[:0, :0]
            return
        index = torch.tensor(kept, device=self.device)
        attention = self._attention[index]
        unused = int(attention.argmax(dim=1).min())  # columns left of every row's first token
        self._attention = attention[:, unused:]
        for layer in self._cache.layers:
            layer.keys = layer.keys[index, :, unused:]
            layer.values = layer.values[index, :, unused:]


def _pad_left(tensor: torch.Tensor, width: int, dim: int) -> torch.Tensor:
    """Zeros on the left of dimension `dim` until it is `width` long."""
    missing = width - tensor.shape[dim]
    if missing == 0:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = missing
    return torch.cat([tensor.new_zeros(shape), tensor], dim=dim)
