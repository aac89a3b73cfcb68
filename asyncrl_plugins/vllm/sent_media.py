"""Processed images and videos on their way to vLLM's core, which keeps what it was sent: later requests name it only.

An item's name is vLLM's `mm_hash`: the digest of its encoded bytes, a video's frame rate, and the arguments of the
processor that the prompt brings. All other settings of the processor, such as model.max_pixels, are fixed when this
vLLM is started, and both of its caches end with it: an item under a name is always the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

KEPT_GIB = 1.0
"""Memory of the items that the core keeps for later requests. Those of requests in work it has in any case, and what
it has dropped is sent again."""
MISSED = "error"
"""vLLM's finish reason of a request that names an item which the core has dropped, and of other failures."""


def submissions(llm: Any, engine_input: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """An input as it is to be submitted, at once when it is taken: the next one where the core answered MISSED."""
    for _ in range(2):  # what was missed is in the second; meanwhile the core may have dropped another item
        given = leave_out_kept(llm, engine_input)
        yield given
        if given is engine_input:
            return
    yield engine_input


def leave_out_kept(llm: Any, engine_input: dict[str, Any]) -> dict[str, Any]:
    """An input without the items that vLLM's core keeps; itself, if the core keeps none.

    vLLM mirrors on this side what the core keeps. The core may have dropped an item all the same, as when a request was
    cancelled on its way: it then answers MISSED, and vLLM takes the item out of the mirror.
    """
    mirror = llm.renderer.mm_processor_cache
    if mirror is None or "mm_hashes" not in engine_input:
        return engine_input
    names: dict[str, list[str]] = engine_input["mm_hashes"]
    for items in names.values():
        for name in items:  # as the core does, in whose order of eviction they are the last then
            mirror.touch_sender_cache_item(name)
    sent = {
        modality: [
            mirror.get_and_update_item((item, ()), name)[0]
            for item, name in zip(engine_input["mm_kwargs"][modality], items, strict=True)
        ]
        for modality, items in names.items()
    }
    leaves_out = any(item is None for items in sent.values() for item in items)
    return {**engine_input, "mm_kwargs": sent} if leaves_out else engine_input
