"""Formulas of the routers' losses, against transformers' own function."""

from __future__ import annotations

import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from asyncrl_plugins.moe.losses import Routed

EXPERTS, CHOSEN = 8, 2


def routed(tokens: int) -> Routed:
    torch.manual_seed(0)
    logits = [torch.randn(tokens, EXPERTS, requires_grad=True) for _ in range(3)]
    return Routed(logits, [each.topk(CHOSEN).indices for each in logits])


def test_load_balancing_is_that_of_transformers() -> None:
    """Value and gradient, and of two micro-batches together where the shares are those of the update."""
    whole = routed(20)
    theirs = load_balancing_loss_func(tuple(whole.logits), EXPERTS, CHOSEN)
    assert isinstance(theirs, torch.Tensor)
    expected = torch.autograd.grad(theirs, whole.logits, retain_graph=True)
    shares = whole.counts().sum(0) / (20 * len(whole.logits))
    parts = [
        Routed([x[part] for x in whole.logits], [n[part] for n in whole.numbers]).balance_loss(shares, 20)
        for part in (slice(0, 13), slice(13, 20))
    ]
    for ours in (whole.balance_loss(shares, 20), sum(parts)):
        assert isinstance(ours, torch.Tensor)
        torch.testing.assert_close(ours, theirs)
        found = torch.autograd.grad(ours, whole.logits, retain_graph=True)
        torch.testing.assert_close(found, expected)


def test_z_loss_is_the_mean_over_tokens_and_layers() -> None:
    whole = routed(5)
    expected = torch.stack([logits.exp().sum(-1).log() ** 2 for logits in whole.logits]).mean()
    torch.testing.assert_close(whole.z_loss(5), expected)
