"""Layers with a state in packed groups, under gradient checkpointing and two passes before one backward pass."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from asyncrl.attention.prefix_kernels import Group
from asyncrl.attention.shared_prefix import SHARED_PREFIX_ATTENTION, make_layout, register
from asyncrl.attention.stateful_layers import RowBatches
from asyncrl.config.sections import ModelConfig
from asyncrl.models.output_head import hidden_states
from asyncrl.models.small_copy import SmallFamily

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
GROUPS: tuple[Group, ...] = ((3, (4, 90, 1)), (5, (2,)), (2, (0,)))
"""Tokens of prompts and of their completions; one has none."""


def test_rows_come_apart_and_together() -> None:
    rows = RowBatches(GROUPS, CPU)
    tokens = torch.arange(sum(prompt + sum(completions) for prompt, completions in GROUPS))
    batches = rows.apart(tokens)
    assert torch.equal(rows.packed(batches), tokens)
    begun = sorted(row.tolist()[:4] for batch in batches for row in batch)
    assert begun == [[0, 1, 2, 3], [0, 1, 2, 7], [0, 1, 2, 97], [98, 99, 100, 101], [105, 106, 105, 105]]


def test_checkpointed_layers_compute_again_with_the_layout_of_their_own_pass(tmp_path: Path) -> None:
    """A loss hook computes a second pass of other groups before the first one's gradient."""
    register()
    config = transformers.Lfm2Config(layer_types=["conv", "full_attention"], num_hidden_layers=2)
    config.save_pretrained(tmp_path)
    family = SmallFamily(ModelConfig(path=str(tmp_path)))

    def gradients(*passes: tuple[Group, ...], checkpointing: bool) -> dict[str, torch.Tensor]:
        model = family.model(SHARED_PREFIX_ATTENTION).train().requires_grad_(True)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        losses: list[torch.Tensor] = []
        for groups in passes:
            layout = make_layout(groups, CPU, torch.float32)
            ids = torch.arange(layout.num_tokens)[None] % 90 + 4
            positions = torch.zeros_like(ids)
            states = hidden_states(model, {"input_ids": ids, "position_ids": positions, "shared_prefix": layout})
            losses.append(states.sin().sum())
        torch.stack(losses).sum().backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    first, second = GROUPS, ((9, (2, 8)),)
    wanted = [gradients(groups, checkpointing=False) for groups in (first, second)]
    found = gradients(first, second, checkpointing=True)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, sum(each[name] for each in wanted), rtol=1e-3, atol=1e-4)
