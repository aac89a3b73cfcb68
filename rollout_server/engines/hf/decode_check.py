"""Check of a model's family at the start: the decode batch samples from the distributions that each row has alone.

The batch keeps keys and values, and pads on the left. States of recurrences and convolutions, or a cache of a family's
own, are neither. A small copy of the model decodes rows of unequal length, which join and leave; each sampled token's
log-prob is compared with that of transformers' plain forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

from asyncrl.config.sections import ModelConfig
from asyncrl.errors import UserError
from asyncrl.models.small_copy import SAME_LOGPROB, SmallFamily, family_of, first_line
from asyncrl.processing.encoded_prompt import EncodedPrompt
from protocol.messages import Sampling
from rollout_server.engines.base import GenerationRequest
from rollout_server.engines.hf.decode_batch import DecodeBatch, DecodeRow
from rollout_server.engines.hf.grouped_attention import for_decoding

PROMPTS = (13, 4, 8)
"""Tokens of the prompts; the later ones join while the first one is decoded."""
TOKENS = 10
"""Sampled for each row at most."""
MakeBatch = Callable[[Any, Sequence[int], torch.device], DecodeBatch]


def check_decoding(config: ModelConfig) -> bool:
    """Raise UserError for a family that this engine would sample wrongly. Returns whether its model may group queries
    (grouped_attention.py): code of some families looks at the name of their attention."""
    family = family_of(config)
    if not decoding_problem(family, groups_queries=True):
        return True
    if found := decoding_problem(family, groups_queries=False):
        raise UserError(
            f"the hf engine, which keeps keys and values of causal attention alone, cannot sample from the model in "
            f"{config.path}: {found}. Set rollout.engine=vllm, or use a model of another family"
        )
    return False


@cache
def decoding_problem(family: SmallFamily, *, groups_queries: bool, kind: MakeBatch = DecodeBatch) -> str:
    """Find out, once in a process, how a family's decoding in such a batch is wrong; empty where it is right."""
    if family.problem:
        return family.problem
    try:
        model = for_decoding(family.model(family.attention), groups_queries=groups_queries)
        rows = _decoded(kind(model, (), torch.device("cpu")), family.temperature)
    except Exception as error:  # of the family's own code
        return f"its family {family.name} fails in a batch ({first_line(error)})"
    model = family.model("eager")
    difference = max(_difference(model, row) for row in rows)
    if difference <= SAME_LOGPROB:
        return ""
    return (
        f"log-probs of its family {family.name} in a batch differ by {difference:.3g} nats from those of each row alone"
    )


def _decoded(batch: DecodeBatch, temperature: float) -> list[DecodeRow]:
    """Rows that were sampled together."""
    rows: list[DecodeRow] = []
    for number, prompt in enumerate(PROMPTS):
        ids = np.random.default_rng(number).integers(4, 100, prompt).astype(np.int32)
        sampling = Sampling(temperature=temperature, max_new_tokens=TOKENS - number, stop_token_ids=())
        request = GenerationRequest(number, EncodedPrompt.of_text(ids), 6, number, sampling)
        batch.join(batch.prefill([request], 0))
        rows = list(batch.rows)
        batch.step(0)
    batch.rebuild_cache()
    while batch.rows:
        batch.step(0)
    return rows


@torch.no_grad()
def _difference(model: Any, row: DecodeRow) -> float:
    """Largest difference between the row's log-probs and those of its tokens in one plain pass."""
    prompt = row.request.prompt.token_ids
    ids = torch.from_numpy(np.concatenate([prompt, row.token_ids[:-1]])).long()
    logits = model(input_ids=ids[None], use_cache=False).logits[0, len(prompt) - 1 :].float()
    logprobs = (logits / row.sampling.temperature).log_softmax(-1)
    return float((logprobs[range(len(row.token_ids)), row.token_ids] - torch.tensor(row.logprobs)).abs().max())
