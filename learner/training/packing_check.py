"""Check of a model's family at the start: packed groups have the log-probs that each row has alone.

What a family computes beside causal attention to the tokens of a row (recurrences, convolutions, sinks, masks of its
own) leaks over packed completions, or is lost. Two completions of one prompt and a row of another group are computed by
a small copy of the model, packed, and each alone with transformers' plain attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

from asyncrl.attention.shared_prefix import SHARED_PREFIX_ATTENTION, register
from asyncrl.attention.stateful_layers import stateful_parts
from asyncrl.config.sections import ModelConfig
from asyncrl.errors import UserError
from asyncrl.model_files.folder import describe_model, model_folder
from asyncrl.models.loading import refuse_dropout
from asyncrl.models.output_head import hidden_states, scaled_logits
from asyncrl.models.small_copy import SAME_LOGPROB, SmallFamily, family_of, first_line
from asyncrl.processing.encoded_prompt import EncodedPrompt
from learner.training.packing import PackedTrajectory, TrainGroup, build_micro_batch, unpacked

ROWS = ((7, (9, 12)), (4, (6,)))
"""Tokens of each group's prompt and of its completions."""
LARGEST_GAP = 0.01
"""Nats by which log-probs of one way to compute a row may differ in a model's own dtype: they are the same sums."""


def packing_obstacle(config: ModelConfig) -> str:
    """Fault of packed groups of this family, for people; empty where there is none.

    Its rows then have to be computed one at a time. Raises UserError where not even that gives the log-probs of its own
    forward pass.
    """
    described = describe_model(model_folder(config), trust_remote_code=config.trust_remote_code)
    refuse_dropout(described, config)
    family = family_of(config)
    packed, alone = _faults(family)
    if alone:
        raise UserError(
            f"the model in {config.path} is of the family {family.name}, whose rows cannot be trained here: packed, "
            f"{packed}; one at a time, {alone}. Use a model of another family"
        )
    return packed


def stateful_obstacle(config: ModelConfig) -> str:
    """Fault of packed groups of this family where ranks gather weights at each call of a module; empty: none.

    Layers with a state compute batches of rows, on one rank more than on another, and both would wait for each other.
    """
    family = family_of(config)
    if family.problem or not any(map(stateful_parts, family.model(family.attention).modules())):
        return ""
    return "its layers with a state are called more often on one rank than on another, and each call gathers weights"


@cache
def _faults(family: SmallFamily) -> tuple[str, str]:
    """Faults of a family's packed groups, and where there is one, of its rows alone; found once in a process."""
    if family.problem:
        return f"{family.problem}, and rows alone are its own forward pass", ""
    register()
    groups = _groups()
    rows = [[TrainGroup(group.prompt, (completion,))] for group in groups for completion in group.completions]
    alone = _plain(family, rows)
    packed = _compare(family, [groups], alone, packs=True)
    return packed, _compare(family, rows, alone, packs=False) if packed else ""


@torch.no_grad()
def check_outputs(model: Any, config: ModelConfig) -> None:
    """Compare log-probs of a short row with the model's own, for a family without a copy. Raises UserError."""
    family = family_of(config)
    if not family.problem:
        return
    ids = {"input_ids": torch.arange(4, 12, device=model.device)[None]}
    own = model(**ids, use_cache=False).logits[0].float().log_softmax(-1)
    ours = scaled_logits(model, hidden_states(model, ids)).float().log_softmax(-1)
    if (difference := float((own - ours).abs().max())) > LARGEST_GAP:
        raise UserError(
            f"the model in {config.path} cannot be trained here: log-probs differ by {difference:.3g} nats from those "
            f"of its own forward pass, and {family.problem}. Use a model of another family"
        )


def _groups() -> list[TrainGroup]:
    draw, row, groups = np.random.default_rng(0), 0, list[TrainGroup]()
    for prompt, lengths in ROWS:
        completions: list[PackedTrajectory] = []
        for length in lengths:
            ids = draw.integers(4, 100, length).astype(np.int32)
            completions.append(PackedTrajectory(row, ids, np.ones(length, bool)))
            row += 1
        ids = draw.integers(4, 100, prompt).astype(np.int32)
        groups.append(TrainGroup(EncodedPrompt.of_text(ids), tuple(completions)))
    return groups


@torch.no_grad()
def _plain(family: SmallFamily, rows: Sequence[Sequence[TrainGroup]]) -> torch.Tensor:
    """[N, V] log-probs of all trained tokens' distributions by the family's own forward, row by row."""
    model = family.model("eager")
    found: list[torch.Tensor] = []
    for ((group,),) in zip(rows, strict=True):
        (completion,) = group.completions
        ids = torch.from_numpy(np.concatenate([group.prompt.token_ids, completion.token_ids[:-1]])).long()
        found.append(model(input_ids=ids[None], use_cache=False).logits[0, len(group.prompt.token_ids) - 1 :])
    return (torch.cat(found).float() / family.temperature).log_softmax(-1)


@torch.no_grad()
def _compare(family: SmallFamily, parts: Sequence[Sequence[TrainGroup]], alone: torch.Tensor, *, packs: bool) -> str:
    """Compare the learner's log-probs of these micro-batches with those of each row alone. Empty where they agree."""
    try:
        model = family.model(SHARED_PREFIX_ATTENTION if packs else family.attention).train()
        found: list[torch.Tensor] = []
        for part in parts:
            micro_batch = build_micro_batch(model, part, torch.device("cpu"))
            inputs = micro_batch.inputs if packs else unpacked(micro_batch)
            found.append(scaled_logits(model, hidden_states(model, inputs)[micro_batch.predict_from]))
        ours = (torch.cat(found).float() / family.temperature).log_softmax(-1)
        difference = float((ours - alone).abs().max())
    except Exception as error:  # of the family's own code
        return first_line(error)
    if difference <= SAME_LOGPROB:
        return ""
    return f"log-probs differ by {difference:.3g} nats from those of each row alone"
