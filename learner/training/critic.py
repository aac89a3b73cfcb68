"""The critic: a model of its own whose head tells the value of the state before each token.

It starts from the policy's weights (or `critic.path`), with a head of zeros, so that its first values are 0.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_model, save_model

from asyncrl.config.schema import RunConfig
from asyncrl.models.output_head import hidden_states
from asyncrl.models.wake_parity import fixed_tokens
from learner.training.engine import TorchEngine
from learner.training.packing import MicroBatch

WEIGHTS_FILE = "critic.safetensors"
FOLDER = "critic"
"""Its files in a checkpoint."""


class Critic(TorchEngine):
    """A training engine whose outputs are values; it is never published."""

    def __init__(self, config: RunConfig, total_updates: int):
        model = config.model.model_copy(
            update={
                "path": config.critic.path or config.model.path,
                "lora": config.model.lora.model_copy(update={"rank": 0}),
            }
        )
        super().__init__(config.model_copy(update={"model": model}), config.critic.optim, total_updates)

    def _make_head(self) -> None:
        text: Any = getattr(self.model.config, "text_config", None) or self.model.config
        head = torch.nn.Linear(text.hidden_size, 1, device=self.device)
        torch.nn.init.zeros_(head.weight)
        torch.nn.init.zeros_(head.bias)
        self.model.value_head = head
        output: Any = self.model.get_output_embeddings()
        if output.weight is not self.model.get_input_embeddings().weight:
            output.requires_grad_(False)  # nothing of the critic's comes from the language model's head
        self._fixed_tokens = fixed_tokens(output.weight.shape[0], [])

    def values(self, micro_batch: MicroBatch) -> torch.Tensor:
        """[n] fp32 value of the state before each trained token."""
        self._sleeper.check_awake()
        hidden = hidden_states(self.model, micro_batch.inputs)[micro_batch.predict_from]
        return self.model.value_head(hidden.float())[:, 0]

    def _fixed_logprobs(self) -> torch.Tensor:
        """What is compared before sleeping and after waking: values of the fixed tokens."""
        with torch.no_grad():
            return self.values(self._fixed_micro_batch()).cpu()

    def save(self, folder: Path) -> None:
        """Save weights, masters, optimiser and schedule."""
        folder.mkdir()
        save_model(self.model, str(folder / WEIGHTS_FILE))
        super().save(folder)

    def load(self, folder: Path) -> None:
        load_model(self.model, folder / WEIGHTS_FILE)
        super().load(folder)
