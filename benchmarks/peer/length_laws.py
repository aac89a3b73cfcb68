"""Models whose completions have lengths by a law, whichever framework samples them.

A law is a chain over tokens: the first token chooses a class, each token of a class is followed by the end with the
class's own probability. A model that follows it ends its completions by itself: no framework needs a setting for it,
and each sees the lengths that an ordinary run would show it, one after another. Every class has an even and an odd
digit, drawn alike; the reward is an even first digit, so that there is something to learn that no length depends on.

The model is the given one with three changes: what its language layers add is 0, so that a token's state is its own
embedding, and the output layer maps the states of the chain to the chain's log-probs. It costs what the given one does,
and everything in it is trained from there.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import asyncrl.processing.torchvision_cpu  # noqa: F401 (before transformers imports torchvision)

REWARD = {"function": "regex_match", "kwargs": {"pattern": r"^\s*[02468]"}, "name": "even"}
NEVER = -20.0
"""Log-prob of a token that the chain does not take."""
START = -1
"""Place of the prompt's last token in a chain."""


@dataclass(frozen=True)
class LengthLaw:
    """Completions of at most `longest` tokens, the end included."""

    longest: int
    shares: tuple[float, ...]
    """Probability of each class."""
    means: tuple[float, ...]
    """Mean number of tokens of each class before the end; inf: no completion ends by itself."""


LAWS = {
    "64 tokens": LengthLaw(64, (1.0,), (float("inf"),)),
    "heavy tails": LengthLaw(128, (0.75, 0.2, 0.05), (4.0, 20.0, 80.0)),
}


@torch.no_grad()
def make_model(source: Path, law: LengthLaw, folder: Path) -> None:
    """Write the model of a law: `source`'s with other weights."""
    from transformers import AutoModelForImageTextToText, AutoProcessor

    processor: Any = AutoProcessor.from_pretrained(source)
    model: Any = AutoModelForImageTextToText.from_pretrained(source, dtype="float32")
    for name, parameter in model.named_parameters():
        if name.endswith(("self_attn.o_proj.weight", "mlp.down_proj.weight")):
            parameter.zero_()
    digits = [processor.tokenizer(f" {digit}")["input_ids"] for digit in range(10)]
    assert all(len(ids) == 1 for ids in digits), "a digit is not one token of this tokenizer"
    prompt = processor.tokenizer.apply_chat_template([{"role": "user", "content": "?"}], add_generation_prompt=True)
    head = model.get_output_embeddings().weight
    chain = chain_of(law, [ids[0] for ids in digits], processor.tokenizer.eos_token_id)
    chain[prompt["input_ids"][-1]] = chain.pop(START)
    logprobs = torch.full((len(chain), len(head)), NEVER)
    for row, following in zip(logprobs, chain.values(), strict=True):
        row[list(following)] = torch.tensor(list(following.values())).log().clamp_min(NEVER)
    embedded = model.get_input_embeddings().weight[list(chain)]
    states = model.base_model.language_model.norm(embedded)
    head.copy_((torch.linalg.pinv(states.double()) @ logprobs.double()).T)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


def chain_of(law: LengthLaw, digits: list[int], end: int) -> dict[int, dict[int, float]]:
    """Probabilities of the tokens that follow each token, and START."""
    chain: dict[int, dict[int, float]] = {START: {}}
    for number, (share, mean) in enumerate(zip(law.shares, law.means, strict=True)):
        pair = digits[2 * number : 2 * number + 2]
        chain[START] |= dict.fromkeys(pair, share / 2)
        for token in pair:
            chain[token] = {**dict.fromkeys(pair, (1 - 1 / mean) / 2), end: 1 / mean}
    return chain
