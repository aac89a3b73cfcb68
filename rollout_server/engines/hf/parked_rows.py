"""Rows whose key-value caches wait for a later turn: between two turns a trajectory's environment is at work.

A row that is not here any more is prefilled as a whole. Which rows are here follows from the order in which turns were
sampled and trajectories ended, so that rounds (`rollout_server/production/rounds.py`) repeat it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np

from asyncrl.processing.processor import EncodedPrompt
from rollout_server.engines.base import GenerationRequest, Parking
from rollout_server.engines.hf.growing_cache import RowLayers

_NO_GRIDS = np.zeros((0, 3), np.int32)


@dataclass(eq=False)
class ParkedRow:
    """All tokens of a row up to the end of a turn, but for the last one, whose keys and values nothing has computed."""

    request_id: int
    token_ids: np.ndarray
    """[L] int32."""
    image_hashes: tuple[str, ...]
    video_hashes: tuple[str, ...]
    pixels: int
    """Rows of `EncodedPrompt.pixel_values` that its images have."""
    kv_version: int
    """Oldest policy version in it."""
    layers: RowLayers
    """[H, L, D] each; whoever restores them takes them away layer by layer."""

    @classmethod
    def of(
        cls,
        request_id: int,
        prompt: EncodedPrompt,
        sampled: list[int],
        kv_version: int,
        layers: RowLayers,
    ) -> ParkedRow:
        return cls(
            request_id=request_id,
            token_ids=np.concatenate([prompt.token_ids, np.asarray(sampled[:-1], np.int32)]),
            image_hashes=prompt.image_hashes,
            video_hashes=prompt.video_hashes,
            pixels=0 if prompt.pixel_values is None else len(prompt.pixel_values),
            kv_version=kv_version,
            layers=layers,
        )

    def __len__(self) -> int:
        return len(self.token_ids)

    def begins(self, prompt: EncodedPrompt) -> bool:
        """Whether the prompt is this row, by its tokens and by its images' contents, and more that ends in text."""
        return (
            len(prompt.token_ids) > len(self)
            and np.array_equal(prompt.token_ids[: len(self)], self.token_ids)
            and prompt.image_hashes[: len(self.image_hashes)] == self.image_hashes
            and prompt.video_hashes == self.video_hashes
            and not prompt.token_types[-1]
        )

    def rest_of(self, prompt: EncodedPrompt) -> EncodedPrompt:
        """Rest of such a prompt behind this row: tokens, and the images among them."""
        images = len(self.image_hashes)
        new_images = len(prompt.image_hashes) > images and prompt.pixel_values is not None
        return replace(
            prompt,
            token_ids=prompt.token_ids[len(self) :],
            token_types=prompt.token_types[len(self) :],
            image_grids=prompt.image_grids[images:],
            image_hashes=prompt.image_hashes[images:],
            pixel_values=prompt.pixel_values[self.pixels :] if new_images and prompt.pixel_values is not None else None,
            video_grids=_NO_GRIDS,
            video_hashes=(),
            video_pixel_values=None,
            unexpanded_ids=None,
        )


class ParkedRows:
    """The rows of all conversations, oldest first. Not thread-safe: the decode loop owns it."""

    def __init__(self) -> None:
        self._places: dict[Parking, None] = {}

    def _kept(self) -> dict[Parking, ParkedRow]:
        """Rows that are still there: a trajectory that has ended has closed its place."""
        kept: dict[Parking, ParkedRow] = {place: row for place in self._places if (row := place.kept) is not None}
        self._places = dict.fromkeys(kept)
        return kept

    @property
    def tokens(self) -> int:
        return sum(map(len, self._kept().values()))

    def add(self, place: Parking, row: ParkedRow) -> None:
        if place.is_open:
            self._places.pop(place, None)
            self._places[place], place.kept = None, row

    def known(self, request: GenerationRequest) -> ParkedRow | None:
        """The row that a later turn goes on with; None: its prompt is computed as a whole."""
        row = request.parking[0].kept if len(request.parking) == 1 else None
        if row is None or request.prefix(0) or not row.begins(request.encoded_prompt(0)):
            return None
        return row

    def take(self, requests: Iterable[GenerationRequest]) -> dict[int, ParkedRow]:
        """Remove what these requests have parked. Returns what they go on with, by `id` of the request."""
        taken: dict[int, ParkedRow] = {}
        for request in requests:
            if (row := self.known(request)) is not None:
                taken[id(request)] = row
            for place in request.parking:
                place.kept = None
        return taken

    def drop(self, unwanted: Callable[[ParkedRow], bool] = lambda row: True) -> None:
        for place, row in self._kept().items():
            if unwanted(row):
                place.kept = None

    def shrink(self, most_tokens: int) -> None:
        """Drop the oldest rows until the others have at most so many tokens."""
        kept = self._kept()
        tokens = sum(map(len, kept.values()))
        for place, row in kept.items():
            if tokens <= most_tokens:
                break
            place.kept = None
            tokens -= len(row)
