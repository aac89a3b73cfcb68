"""A value head: one number for each state of a language model, in the place of its output layer."""

from __future__ import annotations

from typing import Any

import torch

from asyncrl.config.sections import ModelConfig
from asyncrl.errors import UserError
from asyncrl.model_files.folder import model_folder
from asyncrl.model_files.weight_files import open_weights, weight_files
from asyncrl.models.output_head import hidden_states

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
