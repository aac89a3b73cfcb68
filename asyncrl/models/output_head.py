"""From hidden states to log-probs of tokens, with few logits in memory at a time.

The logits of all trained tokens would be the largest tensor of training: 8,192 tokens and a vocabulary of 152k are 5 GB
in fp32, and softmax, choice and their gradients take several such. Tokens therefore pass the output head in chunks, and
the backward pass computes each chunk again. Where the chunks begin follows from shapes and the device's memory, so that
a step that is made again has the same bits; what fits into one chunk is computed once and kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypedDict, Unpack

import torch
from torch.utils.checkpoint import checkpoint

from asyncrl.config.sections import ModelConfig
from asyncrl.errors import UserError
from asyncrl.model_files.folder import model_folder, open_weights, weight_files
from asyncrl.models.sampling_distribution import (
    entropies,
    exact_kl,
    gather_logprobs,
    log_kept_mass,
    sampling_logprobs,
)

SCORE_HEADS = ("score", "v_head.summary")
"""Heads in weight files to begin with: those of transformers' sequence classifiers, and of TRL's value models."""


class ValueHead(torch.nn.Linear):
    """A linear layer to one number that computes in fp32, whatever its weights are stored in."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(input.float(), self.weight.float(), self.bias.float())


def add_value_head(model: Any, device: torch.device) -> torch.nn.Linear:
    """Give the model a `value_head` of zeros in fp32, and take its output layer out of training."""
    text: Any = getattr(model.config, "text_config", None) or model.config
    head = ValueHead(text.hidden_size, 1, device=device)
    torch.nn.init.zeros_(head.weight)
    torch.nn.init.zeros_(head.bias)
    model.value_head = head
    output: Any = model.get_output_embeddings()
    if output.weight is not model.get_input_embeddings().weight:
        output.requires_grad_(False)
    return head


def values(model: Any, inputs: dict[str, Any], places: torch.Tensor) -> torch.Tensor:
    """[n] fp32 value of the states at these places of one packed sequence."""
    return model.value_head(hidden_states(model, inputs)[places])[:, 0]


@torch.no_grad()
def read_score_head(head: torch.nn.Linear, config: ModelConfig) -> None:
    """Set the head to the one that scores sequences in the folder's safetensors, if there is one.

    Raises UserError where that gives several numbers.
    """
    for file in weight_files(model_folder(config)):
        if file.suffix != ".safetensors":
            continue
        with open_weights(file, "pt") as opened:
            for name in [name for name in opened.keys() if name.rpartition(".")[0] in SCORE_HEADS]:  # noqa: SIM118
                tensor = opened.get_tensor(name)
                own = head.bias if name.endswith(".bias") else head.weight
                if tensor.shape != own.shape:
                    raise UserError(
                        f"critic.path is {config.path!r}, whose {name} has the shape {tuple(tensor.shape)}. A value is "
                        f"one number, so that it must be {tuple(own.shape)}: name a reward model of one label"
                    )
                own.copy_(tensor)


LOGITS_PER_CHUNK = 2**26
"""Tokens x vocabulary of one chunk on a CPU: 256 MiB in fp32, 441 tokens of a vocabulary of 152k."""
GPU_PER_CHUNK = 2**34
"""Bytes of a GPU's memory for each such chunk: at 80 GiB 2,207 tokens, whose products keep it busy. A pass holds up to
six tensors of that size, a tenth of the memory."""

Layer = Callable[[torch.Tensor], torch.Tensor]
"""[N, D] -> [N, V]"""
Entropy = Literal["none", "value", "gradient"]
"""Whether a forward pass computes the entropy of each token's distribution, and whether it can be trained."""


@dataclass(frozen=True)
class TokenOutputs:
    """Values at the chosen tokens, fp32 [N]; all but the log-probs are None where they were not asked for."""

    logprobs: torch.Tensor
    entropies: torch.Tensor | None = None
    squared_probabilities: torch.Tensor | None = None
    """Sum over the vocabulary of the squared probabilities of each token's distribution."""
    compared: torch.Tensor | None = None
    """[N, ...] what a Comparison has made of each token's distribution."""


@dataclass(frozen=True)
class Comparison:
    """A function of each token's distribution, and of what else is known of the token."""

    function: Callable[..., torch.Tensor]
    """[n, V] log-probs and [n, ...] of each column -> [n, ...]. The backward pass calls it again."""
    columns: tuple[torch.Tensor, ...] = ()
    """[N, ...] each."""


class Asked(TypedDict, total=False):
    """Results of a pass beside the log-probs of the targets; what is left out is not computed."""

    entropy: Entropy
    squared_probabilities: bool
    comparison: Comparison | None
    as_sampled: bool
    """Log-probs of the truncated distribution that an engine samples from."""


class OutputHead:
    """The last layer of a model and the distribution that is sampled from its logits."""

    def __init__(
        self,
        model: Any,
        *,
        temperature: float,
        banned: torch.Tensor,
        truncation: Mapping[str, float] | None = None,
        gpu_bytes: int = 0,
    ):
        """`banned` [K] token ids are never sampled. `truncation`: top_k, top_p and min_p of `as_sampled`. `gpu_bytes`:
        memory of the GPU that computes; 0 is a CPU."""
        self._model = model
        self._temperature = temperature
        self._banned = banned
        self._truncation = truncation
        self._larger = max(1, round(gpu_bytes / GPU_PER_CHUNK))
        self._vocabulary: int = model.get_output_embeddings().weight.shape[0]
        self._layer: Layer | None = None

    def with_layer(self, layer: Layer) -> OutputHead:
        """Head with a copy of the output layer, for the pass of another model while this one is divided."""
        made = copy(self)
        made._layer = layer
        return made

    def __call__(self, hidden: torch.Tensor, targets: torch.Tensor, **asked: Unpack[Asked]) -> TokenOutputs:
        """Log-prob of each target [N] after each hidden state [N, D], and what else is asked for of its
        distribution."""
        tokens = max(1, self._larger * LOGITS_PER_CHUNK // self._vocabulary)
        compute = partial(self._compute_chunk, asked)
        if len(hidden) > tokens and torch.is_grad_enabled():
            compute = partial(checkpoint, compute, use_reentrant=False, preserve_rng_state=False)
        # `split` of all: slices would each have a gradient as large as all of `hidden`.
        comparison = asked.get("comparison")
        columns = [hidden, targets, *(comparison.columns if comparison else ())]
        found = [compute(*chunk) for chunk in zip(*(column.split(tokens) for column in columns), strict=True)]
        return TokenOutputs(**{name: torch.cat([chunk[name] for chunk in found]) for name in found[0]})

    def kl_after(self, hidden: torch.Tensor) -> Comparison:
        """KL of a model's distributions to this head's after its own hidden states [N, D] before the same tokens."""

        def kl(logprobs: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                others = self.distributions(hidden)
            return exact_kl(logprobs, others)

        return Comparison(kl, (hidden,))

    def distributions(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, D] -> [N, V] log-probs. For few states at a time."""
        logits = scaled_logits(self._model, hidden, self._layer)
        return sampling_logprobs(logits, temperature=self._temperature, banned=self._banned)

    def _compute_chunk(
        self, asked: Asked, hidden: torch.Tensor, targets: torch.Tensor, *columns: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """The columns of TokenOutputs that are asked for."""
        logprobs = self.distributions(hidden)
        found = {"logprobs": gather_logprobs(logprobs, targets)}
        if asked.get("as_sampled") and self._truncation:
            cuts = {
                name: torch.full((len(targets),), value, dtype=torch.float64, device=targets.device)
                for name, value in self._truncation.items()
            }
            found["logprobs"] = found["logprobs"] - log_kept_mass(logprobs, targets, **cuts)
        if asked.get("squared_probabilities"):
            with torch.no_grad():
                found["squared_probabilities"] = logprobs.exp().square().sum(-1)
        if comparison := asked.get("comparison"):
            found["compared"] = comparison.function(logprobs, *columns)
        if (entropy := asked.get("entropy", "none")) != "none":
            with torch.set_grad_enabled(entropy == "gradient" and torch.is_grad_enabled()):
                found["entropies"] = entropies(logprobs)
        return found


def scaled_logits(model: Any, hidden: torch.Tensor, layer: Layer | None = None) -> torch.Tensor:
    """[N, D] -> [N, V]: the output layer, or `layer`, and what some families do with its logits."""
    logits = (layer or model.get_output_embeddings())(hidden)
    config = model.config
    if scaling := getattr(config, "logits_scaling", None):  # Granite
        logits = logits / scaling
    if scale := getattr(config, "logit_scale", None):  # Cohere
        logits = logits * scale
    text = getattr(config, "text_config", None) or config
    if cap := getattr(text, "final_logit_softcapping", None):  # Gemma
        logits = torch.tanh(logits / cap) * cap
    return logits


def hidden_states(model: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
    """[T, D] of one packed sequence after the model's last layer and norm."""
    inner = model.base_model if model.base_model is not model else getattr(model, "model", None)
    if inner is not None:  # Llama 4's text names its base wrongly
        return inner(**inputs, use_cache=False)[0][0]
    given: list[torch.Tensor] = []  # Llama 4 with images has none: all but the head is the whole model's own pass

    def take(_: Any, arguments: tuple[torch.Tensor]) -> torch.Tensor:
        given.extend(arguments)
        return arguments[0][:, :0]

    with model.get_output_embeddings().register_forward_pre_hook(take):
        model(**inputs, use_cache=False)
    return given[0][0]
