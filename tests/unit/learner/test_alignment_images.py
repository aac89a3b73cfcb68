"""Images on their way: other ones, fewer, smaller or in another order are caught group by group."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from asyncrl.config.schema import RunConfig
from asyncrl.config.sections import ModelConfig
from asyncrl.data.images import content_hash
from asyncrl.processing.encoded_prompt import EncodedPrompt
from asyncrl.processing.processor import PromptProcessor
from protocol.codec import encode
from protocol.errors import ProtocolError
from protocol.messages import Prompt
from rollout_server.engines.hf.engine import HFEngine
from tests.rigs.alignment_rig import Blobs, answer, pair_config, parity_tickets, verify
from tests.system.test_bad_input import png, write_rows

__all__ = ["pair_config"]
OTHER = png((56, 56), 99)


class DropsAnImage(PromptProcessor):
    def encode(self, prompt: Prompt, blobs: Mapping[str, bytes | memoryview]) -> EncodedPrompt:
        (message,) = prompt.messages
        first = next(i for i, part in enumerate(message.content) if part.type == "image")
        rest = message.model_copy(update={"content": (*message.content[:first], *message.content[first + 1 :])})
        update = {"messages": (rest,), "image_hashes": prompt.image_hashes[1:]}
        return super().encode(prompt.model_copy(update=update), blobs)


class ScalesDown(PromptProcessor):
    """The processor of a server that got past the handshake."""

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.processor.image_processor.size = {"shortest_edge": 28 * 28, "longest_edge": 28 * 28}


def in_wrong_order(blobs: Blobs) -> Blobs:
    """Both have one size: ids and grids are right, and the ticket's own hashes would be, too."""
    return dict(zip(blobs, reversed(blobs.values()), strict=True))


def another_under_its_name(blobs: Blobs) -> Blobs:
    return {**blobs, next(iter(blobs)): OTHER}


@pytest.mark.parametrize(
    ("theirs", "swap", "says"),
    [
        (PromptProcessor, in_wrong_order, "from server-1: the images are in another order"),
        (PromptProcessor, another_under_its_name, f"image 0 has other bytes: their hash is {content_hash(OTHER)[:12]}"),
        (DropsAnImage, dict, r"saw 1 image\(s\), the prompt has 2"),
        (ScalesDown, dict, r"image grids .* \[1, 4, 4\].* against .*\[1, 8, 8\]"),
    ],
)
def test_what_was_encoded_is_not_what_was_sent(
    pair_config: RunConfig,
    theirs: type[PromptProcessor],
    swap: Callable[[Blobs], Blobs],
    says: str,
) -> None:
    processor = PromptProcessor(pair_config.model)
    items = parity_tickets(pair_config, processor)
    received = answer(HFEngine(pair_config, processor), theirs(pair_config.model), items, swap)
    with pytest.raises(ProtocolError, match=f"row rows.jsonl:1 .*{says}"):
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
