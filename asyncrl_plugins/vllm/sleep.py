"""Sleep and wake of vLLM: the memory that it gives back, and a check that it wakes up as it was.

On a CPU vLLM changes its state only: no memory is freed there, and none is reported.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch

from asyncrl.devices.device import is_out_of_memory
from asyncrl.devices.sleeping import check_wake_parity, fixed_tokens, no_room_to_wake
from asyncrl_plugins.vllm.conversion import engine_input_of

OWNER = "the vllm engine"


@dataclass(frozen=True)
class Asleep:
    before: torch.Tensor | None
    """[T - 1] log-probs of the fixed tokens; None at level 2, where nothing is kept that could be compared."""
    freed_bytes: int
    """Memory given back on all its devices: weights, key-value cache, and working memory."""


async def fall_asleep(llm: Any, level: int, special: Collection[int]) -> Asleep:
    """Put an engine without requests to sleep. It must not be paused, or it answers neither probe nor sleep."""
    before = await fixed_logprobs(llm, special) if level == 1 else None
    free = await free_device_bytes(llm)
    await llm.sleep(level=level, mode="wait")
    return Asleep(before, max(0, await free_device_bytes(llm) - free))


async def wake_up(llm: Any, asleep: Asleep, special: Collection[int], device: torch.device) -> None:
    """Raises BadStateError where there is no room, or for a model that is not what it was."""
    await _take_memory(llm, asleep, device)
    if asleep.before is not None:
        after = await fixed_logprobs(llm, special)
        check_wake_parity(OWNER, asleep.before, after, device)


async def _take_memory(llm: Any, asleep: Asleep, device: torch.device) -> None:
    await llm.collective_rpc("free_caches")
    free = await free_device_bytes(llm)
    try:
        await llm.wake_up()
    except Exception as problem:  # from another process: of its class only the words are left
        if not is_out_of_memory(problem):
            raise
        left = await free_device_bytes(llm)
        raise no_room_to_wake(OWNER, device, asleep.freed_bytes, max(0, free - left), left) from problem


async def free_device_bytes(llm: Any) -> int:
    return sum(await llm.collective_rpc("free_device_bytes"))


async def fixed_logprobs(llm: Any, special: Collection[int]) -> torch.Tensor:
    """[T - 1] log-probs of the fixed tokens. The key-value cache takes part, cached prefixes do not."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams  # pyright: ignore[reportMissingImports]

    ids = fixed_tokens(llm.vllm_config.model_config.get_vocab_size(), special).tolist()
    params = SamplingParams(
        temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
    )
    last: Any = None
    async for answer in llm.generate(await engine_input_of(llm, {"prompt_token_ids": ids}), params, "asyncrl-probe"):
        last = answer
    places = zip(last.prompt_logprobs[1:], ids[1:], strict=True)
    return torch.tensor([place[token].logprob for place, token in places])
