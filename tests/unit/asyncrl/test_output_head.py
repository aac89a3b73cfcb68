"""Log-probs in chunks of tokens: the same numbers, a fraction of the memory, and families whose logits are scaled."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from asyncrl.memory_plan import GIB
from asyncrl.memory_plan.live_bytes import LiveBytes
from asyncrl.models import output_head
from asyncrl.models.output_head import Entropy, OutputHead, TokenOutputs

pytestmark = pytest.mark.usefixtures("one_thread")
TOKENS, VOCABULARY, WIDTH = 250, 1000, 16
COPIES = 4
"""[tokens, vocabulary] tensors of one chunk that are alive at once, at most."""


class Made:
    """A head, hidden states and targets, and one pass through them."""

    def __init__(self, gpu_bytes: int = 0) -> None:
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.linear.weight.grad = torch.zeros_like(self.linear.weight)
        self.hidden = torch.randn(TOKENS, WIDTH, requires_grad=True)
        self.targets = torch.randint(4, VOCABULARY, (TOKENS,))
        model = SimpleNamespace(get_output_embeddings=lambda: self.linear, config=SimpleNamespace())
        self.head = OutputHead(model, temperature=0.7, banned=torch.tensor([1, 3]), gpu_bytes=gpu_bytes)

    def run(self, entropy: Entropy) -> TokenOutputs:
        outputs = self.head(self.hidden, self.targets, entropy=entropy)
        loss = outputs.logprobs.sum()
        if outputs.entropies is not None and outputs.entropies.requires_grad:
            loss = loss + outputs.entropies.sum()
        loss.backward()
        return outputs


@pytest.mark.parametrize("entropy", ["none", "value", "gradient"])
def test_chunks_change_memory_and_not_the_numbers(monkeypatch: pytest.MonkeyPatch, entropy: Entropy) -> None:
    """A token's values and the gradient of its state have the same bits; the head's own is summed in another order."""
    results: list[tuple[Made, TokenOutputs, int]] = []
    for tokens_per_chunk in (TOKENS, 16):
        monkeypatch.setattr(output_head, "LOGITS_PER_CHUNK", tokens_per_chunk * VOCABULARY)
        made = Made()
        with LiveBytes("cpu", known=[made.linear.weight, made.linear.weight.grad, made.hidden]) as live:
            outputs = made.run(entropy)
        results.append((made, outputs, live.peak))
    (whole, expected, most), (made, outputs, peak) = results
    assert torch.equal(outputs.logprobs, expected.logprobs)
    assert (outputs.entropies is None) == (entropy == "none")
    if outputs.entropies is not None and expected.entropies is not None:
        assert torch.equal(outputs.entropies, expected.entropies)
        assert outputs.entropies.requires_grad == (entropy == "gradient")
    assert made.hidden.grad is not None
    assert torch.equal(made.hidden.grad, whole.hidden.grad)
    torch.testing.assert_close(made.linear.weight.grad, whole.linear.weight.grad)
    assert peak < (COPIES + 1.5 * (entropy == "gradient")) * 16 * VOCABULARY * 4 + 3 * made.linear.weight.nbytes
    assert peak < most / 5


@pytest.mark.parametrize(("memory_gib", "tokens"), [(0, 16), (12, 16), (24, 32), (80, 80), (141, 144)])
def test_a_gpus_chunks_grow_with_its_memory(monkeypatch: pytest.MonkeyPatch, memory_gib: int, tokens: int) -> None:
    """By as much as a CPU's for each 16 GiB."""
    monkeypatch.setattr(output_head, "LOGITS_PER_CHUNK", 16 * VOCABULARY)
    made, seen = Made(memory_gib * GIB), list[int]()
    made.linear.register_forward_pre_hook(lambda _, given: seen.append(len(given[0])))
    with torch.no_grad():
        made.head(made.hidden, made.targets)
    assert max(seen) == tokens
    assert sum(seen) == TOKENS


def test_the_exact_kl_to_another_model_holds_few_distributions(monkeypatch: pytest.MonkeyPatch) -> None:
    results: list[tuple[torch.Tensor, torch.Tensor, int]] = []
    for tokens_per_chunk in (TOKENS, 16):
        monkeypatch.setattr(output_head, "LOGITS_PER_CHUNK", tokens_per_chunk * VOCABULARY)
        made, others = Made(), Made()
        torch.nn.init.normal_(others.linear.weight)
        hidden = torch.randn(TOKENS, WIDTH)
        with LiveBytes("cpu", known=[made.linear.weight, others.linear.weight, made.hidden, hidden]) as live:
            kl = made.head(made.hidden, made.targets, comparison=others.head.kl_after(hidden)).compared
            assert kl is not None
            kl.sum().backward()
        assert made.hidden.grad is not None
        results.append((kl, made.hidden.grad, live.peak))
    (expected, gradient, most), (kl, chunked, peak) = results
    assert torch.equal(kl, expected)
    assert torch.equal(chunked, gradient)
    ours, theirs = (each.head.distributions(states).exp() for each, states in ((made, made.hidden), (others, hidden)))
    pointwise = torch.where(ours > 0, ours * (ours / theirs).log(), 0.0)
    torch.testing.assert_close(kl, pointwise.sum(-1))
    assert peak < most / 5
