"""A few fixed tokens' log-probs, before sleep and after waking: weights that came back damaged are noticed."""

from __future__ import annotations

from typing import Any

import numpy as np

from asyncrl.errors import BadStateError
from rollout_server.engines.vllm_engine.library import Library

PROBE_TOKENS = 16
TOLERANCES = {"float32": 1e-3, "bfloat16": 0.05}
"""In nats, by the model's dtype. The same kernels run on the same bits twice; damage moves log-probs by whole nats."""


async def probe(llm: Any, vllm: Library, banned: tuple[int, ...]) -> np.ndarray:
    """[PROBE_TOKENS - 1] log-probs of a fixed text. The key-value cache takes part, cached prefixes do not."""
    size = llm.vllm_config.model_config.get_vocab_size()
    ids = [token for token in range(0, size, max(1, size // (2 * PROBE_TOKENS))) if token not in banned][:PROBE_TOKENS]
    parsed = vllm.parse_model_prompt(llm.vllm_config.model_config, {"prompt_token_ids": ids})
    (engine_input,) = await llm.renderer.render_cmpl_async([parsed])
    params = vllm.SamplingParams(
        temperature=0,
        max_tokens=1,
        prompt_logprobs=0,
        detokenize=False,
        output_kind=vllm.RequestOutputKind.FINAL_ONLY,
    )
    last: Any = None
    async for answer in llm.generate(engine_input, params, "asyncrl-probe"):
        last = answer
    return np.asarray([place[token].logprob for place, token in zip(last.prompt_logprobs[1:], ids[1:], strict=True)])


def check_probe(before: np.ndarray, after: np.ndarray, dtype: str) -> None:
    """Raises BadStateError if the model is not what it was."""
    gap = float(np.abs(before - after).max())
    if not gap <= TOLERANCES[dtype]:
        raise BadStateError(
            f"vLLM woke up damaged: log-probs of {len(before)} fixed tokens differ by up to {gap:.3g} from "
            f"those before it slept (at most {TOLERANCES[dtype]:g} is rounding)"
        )
