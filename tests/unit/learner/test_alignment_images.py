"""Images on their way: other ones, fewer, smaller or in another order are caught group by group."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from asyncrl.config.schema import RunConfig
from asyncrl.data.images import content_hash
from asyncrl.models.processing import EncodedPrompt, PromptProcessor
from protocol.codec import encode
from protocol.errors import ProtocolError
from protocol.messages import Prompt
from rollout_server.engines.hf.engine import HFEngine
from tests.rigs.alignment_rig import Blobs, answer, pair_config, parity_tickets, verify
from tests.system.test_bad_input import png, write_rows

__all__ = ["pair_config"]


def test_images_in_the_wrong_order_are_caught_by_the_hashes_of_what_was_encoded(pair_config: RunConfig) -> None:
    """Both have one size: ids and grids are right, and the ticket's own hashes would be, too."""

    def swapped(blobs: Blobs) -> Blobs:
        return dict(zip(blobs, reversed(blobs.values()), strict=True))

    processor = PromptProcessor(pair_config.model)
    items = parity_tickets(pair_config, processor)
    received = answer(HFEngine(pair_config, processor), PromptProcessor(pair_config.model), items, swapped)
    assert np.array_equal(received[0].group.prompt_ids, items[0].facts.token_ids)
    with pytest.raises(ProtocolError, match=r"row rows.jsonl:1 from server-1: the images are in another order"):
        verify(received[0])


class DropsAnImage(PromptProcessor):
    def encode(self, prompt: Prompt, blobs: Mapping[str, bytes | memoryview]) -> EncodedPrompt:
        (message,) = prompt.messages
        first = next(i for i, part in enumerate(message.content) if part.type == "image")
        rest = message.model_copy(update={"content": (*message.content[:first], *message.content[first + 1 :])})
        update = {"messages": (rest,), "image_hashes": prompt.image_hashes[1:]}
        return super().encode(prompt.model_copy(update=update), blobs)


def test_a_wrong_count_of_images_is_caught(pair_config: RunConfig) -> None:
    processor = PromptProcessor(pair_config.model)
    items = parity_tickets(pair_config, processor)
    received = answer(HFEngine(pair_config, processor), DropsAnImage(pair_config.model), items)
    with pytest.raises(ProtocolError, match=r"row rows.jsonl:1 .* saw 1 image\(s\), the prompt has 2"):
        verify(received[0])


def test_a_wrong_size_of_an_image_is_caught_by_its_grid(pair_config: RunConfig) -> None:
    """A server that got past the handshake, and scales its images down."""
    processor, theirs = PromptProcessor(pair_config.model), PromptProcessor(pair_config.model)
    theirs.processor.image_processor.size = {"shortest_edge": 28 * 28, "longest_edge": 28 * 28}
    items = parity_tickets(pair_config, processor)
    received = answer(HFEngine(pair_config, processor), theirs, items)
    with pytest.raises(ProtocolError, match=r"row rows.jsonl:1 .* image grids .* \[1, 4, 4\].* against .*\[1, 8, 8\]"):
        verify(received[0])


def test_other_bytes_under_the_same_name_are_caught(pair_config: RunConfig) -> None:
    other = png((56, 56), 99)
    processor = PromptProcessor(pair_config.model)
    items = parity_tickets(pair_config, processor)
    received = answer(
        HFEngine(pair_config, processor),
        PromptProcessor(pair_config.model),
        items,
        lambda blobs: {**blobs, next(iter(blobs)): other},
    )
    with pytest.raises(ProtocolError, match=f"image 0 has other bytes: their hash is {content_hash(other)[:12]}"):
        verify(received[0])


def test_images_travel_once_and_only_with_the_ticket(pair_config: RunConfig, tmp_path: Path) -> None:
    """The same image twice in a row is one blob; a group carries hashes and no blob."""
    write_rows(tmp_path, [{"prompt": "<image><image>?", "images": ["0.png", "0.png"]}])
    processor = PromptProcessor(pair_config.model)
    (item,) = parity_tickets(pair_config, processor)
    assert len(item.ticket.prompt.image_hashes) == 2
    assert list(item.blobs) == [item.ticket.prompt.image_hashes[0]]
    (received,) = answer(HFEngine(pair_config, processor), processor, [item])
    verify(received)
    largest = max(memoryview(frame).nbytes for frame in encode(received.group)[1:])
    assert largest < len(item.blobs[item.ticket.prompt.image_hashes[0]])
