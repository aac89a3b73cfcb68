"""Packing of groups into micro-batches: each group's prompt once, then its completions, with the images in them.

The attention between them is in asyncrl/attention/shared_prefix.py. The last token of a completion predicts nothing
that was sampled, so it is a target but no input. A trajectory whose history was rewritten is packed as several
completions, its segments, which stay together: losses may weigh whole trajectories.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from asyncrl.attention.masked_attention import window_of
from asyncrl.attention.shared_prefix import make_layout
from asyncrl.errors import UserError
from asyncrl.processing.encoded_prompt import EncodedPrompt
from asyncrl.processing.image_grids import images_of
from asyncrl.processing.model_inputs import media_inputs, positions_behind, prompt_positions


@dataclass(frozen=True)
class Segment:
    """Tokens of a trajectory that see the prompt and each other, up to where the next segment begins."""

    start: int = 0
    """Index of the first token."""
    observed: EncodedPrompt | None = None
    """Tokens with the images that an environment showed among them; None: they are all text."""


@dataclass(frozen=True)
class PackedTrajectory:
    """One trajectory to train on. Columns are [T]."""

    row: int
    """Index in the batch."""
    token_ids: np.ndarray
    is_trained: np.ndarray
    """bool: tokens that count in the loss."""
    segments: tuple[Segment, ...] = (Segment(),)
    """Segments in order; the first one begins with token 0. They are packed like completions of their own."""
    traces: Mapping[str, np.ndarray] = field(default_factory=dict, compare=False)
    """[T, width] uint8, by name."""

    @property
    def num_inputs(self) -> int:
        """Packed input tokens: all but the last of each segment."""
        return len(self.token_ids) - len(self.segments)

    @property
    def segment_lengths(self) -> list[int]:
        starts = [segment.start for segment in self.segments]
        return [end - start for start, end in pairwise([*starts, len(self.token_ids)])]

    @property
    def observed(self) -> list[EncodedPrompt]:
        """Segments with images of observations."""
        return [segment.observed for segment in self.segments if segment.observed is not None]


@dataclass(frozen=True)
class TrainGroup:
    """A prompt and its completions."""

    prompt: EncodedPrompt
    completions: tuple[PackedTrajectory, ...]
    encode: Callable[[], EncodedPrompt] | None = field(default=None, compare=False)
    """Computes the prompt with its pixels, where `prompt` has none: for the rank that packs it."""
    traces: Mapping[str, np.ndarray] = field(default_factory=dict, compare=False)
    """[P, width] uint8 of the prompt's tokens, by name."""

    @property
    def whole_prompt(self) -> EncodedPrompt:
        return self.encode() if self.encode else self.prompt

    @cached_property
    def num_tokens(self) -> int:
        """Packed input tokens."""
        return len(self.prompt.token_ids) + sum(completion.num_inputs for completion in self.completions)


@dataclass(frozen=True)
class MicroBatch:
    """Packed groups as inputs of one forward pass, and the N tokens that are trained on."""

    inputs: dict[str, Any]
    """Keyword arguments of the model's forward: one packed sequence of L tokens."""
    predict_from: torch.Tensor
    """[N] positions in the packed sequence whose logits predict a trainable token."""
    targets: torch.Tensor
    """[N] those tokens."""
    row: torch.Tensor
    """[N] the batch's row of each."""
    column: torch.Tensor
    """[N] its place in the row's completion."""
    groups: tuple[TrainGroup, ...] = ()
    """The packed groups."""
    traces: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """[L, width] uint8 of all packed tokens, by name: those that all groups have."""
    is_idle: bool = False
    """True for a placeholder that keeps collectives aligned: it belongs to another rank and counts nowhere."""

    @property
    def num_tokens(self) -> int:
        return self.inputs["input_ids"].shape[1]


def flat_rows(lengths: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Row, and place within it, of each token of rows of these lengths, one row after another. [N], [N] int64"""
    row = np.repeat(np.arange(len(lengths)), lengths)
    starts = np.cumsum(lengths) - lengths
    return row, np.arange(len(row)) - starts[row]


def plan_micro_batches(groups: Sequence[TrainGroup], tokens_per_microbatch: int) -> list[list[TrainGroup]]:
    """Fill micro-batches in order up to the budget; a group over the budget is split, its prompt repeated."""
    plan: list[list[TrainGroup]] = []
    room = 0
    for group in groups:
        for part in split_group(group, tokens_per_microbatch):
            if part.num_tokens > room:
                plan.append([])
                room = tokens_per_microbatch
            plan[-1].append(part)
            room -= part.num_tokens
    return plan


def split_group(group: TrainGroup, budget: int) -> list[TrainGroup]:
    """Parts within the budget where possible, at least one completion each."""
    if group.num_tokens <= budget:
        return [group]
    parts: list[list[PackedTrajectory]] = []
    tokens = 0
    for completion in group.completions:
        inputs = completion.num_inputs
        if parts and tokens + inputs <= budget:
            parts[-1].append(completion)
            tokens += inputs
        else:
            parts.append([completion])
            tokens = len(group.prompt.token_ids) + inputs
    return [replace(group, completions=tuple(part)) for part in parts]


def build_micro_batch(
    model: Any,
    groups: Sequence[TrainGroup],
    device: torch.device,
    dtype: torch.dtype | None = None,
    *,
    media_on: torch.device | None = None,
) -> MicroBatch:
    """Pack the groups into one sequence and say which logits predict which trainable token.

    `dtype`: what the model computes in, where its parameters are kept in another one. `media_on`: where pixels are,
    if not on `device`.
    """
    completions = [completion for group in groups for completion in group.completions]
    pieces = [(group, segment) for group in groups for c in group.completions for segment in c.segments]
    lengths = [(len(g.prompt.token_ids), [n for c in g.completions for n in c.segment_lengths]) for g in groups]
    tokens = np.concatenate([completion.token_ids for completion in completions])
    number, place = flat_rows([length for _, of_group in lengths for length in of_group])  # of segments
    group_of = np.repeat(np.arange(len(groups)), [sum(of_group) for _, of_group in lengths])
    found = [prompt_positions(model, group.prompt) for group in groups]
    prompt_position = torch.cat([position for position, _ in found], dim=1).numpy()
    position = np.tile(place + np.asarray([following for _, following in found])[group_of], (len(prompt_position), 1))
    token_types = np.zeros(len(tokens), np.int32)  # 1 on the tokens of images
    for i, (group, segment) in enumerate(pieces):
        if segment.observed is not None:
            token_types[number == i] = segment.observed.token_types
            position[:, number == i] = positions_behind(model, group.prompt, segment.observed)
    is_input = np.append(number[1:] == number[:-1], False)  # all but the last of each segment
    sizes = [size for prompt, of_group in lengths for size in (prompt, sum(of_group) - len(of_group))]
    is_prompt = np.repeat(np.arange(len(sizes)) % 2 == 0, sizes)
    ids = _packed(is_prompt, np.concatenate([g.prompt.token_ids for g in groups]), tokens[is_input])
    types = _packed(is_prompt, np.concatenate([g.prompt.token_types for g in groups]), token_types[is_input])[None]
    position_ids = _packed(is_prompt, prompt_position, position[:, is_input]).to(device)
    # A token is predicted from the one before it, and the first one of a segment from the prompt's last. Each segment
    # before a token's own has an input less than tokens.
    before = np.cumsum([prompt for prompt, _ in lengths])[group_of] + np.arange(len(tokens)) - number
    sources = np.where(place == 0, np.cumsum(sizes)[::2][group_of], before) - 1
    kept = np.flatnonzero(np.concatenate([completion.is_trained for completion in completions]))
    owner, column = flat_rows([len(completion.token_ids) for completion in completions])
    rows = np.asarray([completion.row for completion in completions])
    prompts = [group.whole_prompt for group in groups]
    seen = [
        piece
        for group, prompt in zip(groups, prompts, strict=True)
        for piece in (prompt, *(observed for c in group.completions for observed in c.observed))
    ]
    media, media_on = media_inputs(model, seen, types), media_on or device
    return MicroBatch(
        inputs={
            "input_ids": ids[None].to(device),
            # [3, 1, L] for multimodal rotary positions, else [1, L]
            "position_ids": position_ids[:, None] if position_ids.shape[0] == 3 else position_ids,
            **{name: tensor.to(media_on) for name, tensor in media.items()},
            "shared_prefix": make_layout(
                [(prompt, [length - 1 for length in of_group]) for prompt, of_group in lengths],
                device,
                dtype or model.dtype,
                window=window_of(model.config),
                spans=[images_of(model).spans(group.prompt.token_types) for group in groups],
            ),
        },
        predict_from=torch.from_numpy(sources[kept]).to(device),
        targets=torch.from_numpy(tokens[kept]).long().to(device),
        row=torch.from_numpy(rows[owner[kept]]),
        column=torch.from_numpy(column[kept]),
        groups=tuple(groups),
        traces={
            name: _packed(
                is_prompt,
                np.concatenate([group.traces[name] for group in groups]).T,
                np.concatenate([completion.traces[name] for completion in completions])[is_input].T,
            ).T.to(device)
            for name in set(groups[0].traces).intersection(*(group.traces for group in groups[1:]))
        },
    )


def unpacked(micro_batch: MicroBatch) -> dict[str, Any]:
    """Arguments of a model that computes one row at a time with its own attention: without the layout, and without
    positions that only count tokens, which not every family takes. Raises UserError where more than one row is trained.
    """
    rows = [c for group in micro_batch.groups for c in group.completions if c.is_trained.any()]
    if len(rows) > 1 or any(len(row.segments) > 1 for row in rows):
        raise UserError(
            f"this model computes each row alone, and a trajectory or micro-batch has several: {len(rows)} completions "
            f"of {sum(len(row.segments) for row in rows)} segments. Leave the history as it is (environment.history), "
            "or use a model whose rows can be packed"
        )
    inputs = {name: value for name, value in micro_batch.inputs.items() if name != "shared_prefix"}
    if inputs["position_ids"].ndim == 2:
        del inputs["position_ids"]
    return inputs


def _packed(is_prompt: np.ndarray, prompts: np.ndarray, inputs: np.ndarray) -> torch.Tensor:
    """[..., L] of all prompts [..., P] and all inputs of completions [..., C], each in their order; integers, but for
    bytes, as int64."""
    kind = np.uint8 if prompts.dtype == np.uint8 else np.int64
    packed = np.empty((*prompts.shape[:-1], len(is_prompt)), kind)
    packed[..., is_prompt], packed[..., ~is_prompt] = prompts, inputs
    return torch.from_numpy(packed)
