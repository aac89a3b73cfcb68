"""Ids that can never be sampled, as a logits processor of vLLM's.

vLLM's front-end process imports this file, too, where it may not touch a device: nothing here imports layers or models.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.sample.logits_processor.interface import (  # pyright: ignore[reportMissingImports]
    LogitsProcessor as LogitsProcessorV1,
)
from vllm.v1.worker.gpu.sample.logits_processor.interface import (  # pyright: ignore[reportMissingImports]
    LogitsProcessor as LogitsProcessorV2,
)

from asyncrl_plugins.vllm.engine_process import BANNED_KEY


class BannedTokens(LogitsProcessorV1, LogitsProcessorV2):
    """Minus infinity on the ids that must never be sampled, in every row, before anything else looks at the logits.

    One class for both of vLLM's model runners: V1 on a CPU, V2 on CUDA. Each refuses a class that is not its own
    interface's.

    Not `logit_bias`, which vLLM clamps to -100: a policy that has learned a placeholder id could still sample it, and
    its log-probs would not be those of the learner's distribution. Not `allowed_token_ids`, which V2 limits to 1,024;
    nor `bad_words`, which V2 looks up by text.
    """

    def __init__(self, vllm_config: Any, place: Any, is_pin_memory: bool = False):
        """`place`: V1 gives the device, V2 the state of its requests, which names it."""
        banned = vllm_config.additional_config[BANNED_KEY]
        device = place if isinstance(place, torch.device) else place.device
        self.__banned = torch.tensor(sorted(banned), dtype=torch.long, device=device)

    def is_argmax_invariant(self) -> bool:
        return False  # greedy decoding must not choose one either

    def update_state(self, batch_update: Any) -> None:
        pass

    def apply(self, logits: torch.Tensor, ctx: Any = None) -> torch.Tensor:
        """[N, V] -> [N, V], in place. `ctx` is V2's layout of the batch: every row is treated alike."""
        return logits.index_fill_(-1, self.__banned, float("-inf"))
