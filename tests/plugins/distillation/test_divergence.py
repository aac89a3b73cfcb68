"""Generalised JSD on the teacher's likeliest tokens and all others: right against the paper, TRL and the whole
vocabulary, and a divergence where terms of the likeliest tokens alone are none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from asyncrl.memory_plan.live_bytes import LiveBytes
from asyncrl.models import output_head
from asyncrl.models.output_head import Comparison
from asyncrl.models.sampling_distribution import sampling_logprobs
from asyncrl_plugins.distillation.divergence import class_logprobs, generalised_jsd, likeliest
from tests.unit.asyncrl.test_output_head import TOKENS, Made
from tests.unit.asyncrl.test_output_head import VOCABULARY as HEAD_VOCABULARY

pytestmark = pytest.mark.usefixtures("one_thread")
VOCABULARY, PLACES, TOP = 40, 6, 5
BETAS = (0.0, 0.1, 0.5, 0.9, 1.0)


def logits(seed: int) -> torch.Tensor:
    """[PLACES, VOCABULARY] float64"""
    return 3 * torch.randn(PLACES, VOCABULARY, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def divergence(student: torch.Tensor, teacher: torch.Tensor, beta: float, top_k: int = TOP) -> torch.Tensor:
    """[n] of logits, as the hook computes it."""
    ours, theirs = student.log_softmax(-1), teacher.log_softmax(-1)
    ids = likeliest(theirs, top_k)
    return generalised_jsd(class_logprobs(ours, ids), class_logprobs(theirs, ids), beta)


def gradient_of(loss: Callable[[torch.Tensor], torch.Tensor], student: torch.Tensor) -> torch.Tensor:
    student = student.clone().requires_grad_()
    return torch.autograd.grad(loss(student).sum(), student)[0]


@pytest.mark.parametrize("beta", BETAS)
def test_it_is_the_papers_formula_term_by_term(beta: float) -> None:
    """Over probabilities, the class of others by subtraction; the ends are the two KLs."""
    student, teacher = logits(0), logits(1)
    q, p = student.softmax(-1), teacher.softmax(-1)
    chosen = p.argsort(descending=True)[:, :TOP]
    for place, found in enumerate(divergence(student, teacher, beta).tolist()):
        own, theirs = ([*x[place, chosen[place]].tolist()] for x in (q, p))
        own, theirs = [*own, 1 - sum(own)], [*theirs, 1 - sum(theirs)]
        total = 0.0
        for ours, other in zip(own, theirs, strict=True):
            ours, other = torch.tensor(ours, dtype=torch.float64), torch.tensor(other, dtype=torch.float64)
            mixture = beta * other + (1 - beta) * ours
            if beta == 0:
                total += float(other * (other / ours).log())
            elif beta == 1:
                total += float(ours * (ours / other).log())
            else:
                total += float(beta * other * (other / mixture).log() + (1 - beta) * ours * (ours / mixture).log())
        assert found == pytest.approx(total, abs=1e-9)


@pytest.mark.parametrize("beta", BETAS)
def test_with_all_tokens_it_is_trls_function_and_its_gradient(beta: float) -> None:
    trainer = pytest.importorskip("trl.experimental.gkd.gkd_trainer").GKDTrainer
    student, teacher = logits(2), logits(3)

    def theirs(student: torch.Tensor) -> torch.Tensor:
        return trainer.generalized_jsd_loss(student, teacher, beta=beta, temperature=1.0, reduction="none").sum(-1)

    def ours(student: torch.Tensor) -> torch.Tensor:
        return divergence(student, teacher, beta, top_k=VOCABULARY)

    torch.testing.assert_close(ours(student), theirs(student), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(gradient_of(ours, student), gradient_of(theirs, student), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("beta", BETAS)
def test_few_classes_say_less_than_the_vocabulary_and_nothing_only_where_they_agree(beta: float) -> None:
    student, teacher = logits(4), logits(5)
    by_k = torch.stack([divergence(student, teacher, beta, k) for k in (1, TOP, VOCABULARY - 1, VOCABULARY)])
    assert bool((by_k > 0).all())
    assert bool((by_k[1:] >= by_k[:-1] - 1e-12).all())
    assert divergence(teacher, teacher, beta).abs().max() < 1e-12
    assert gradient_of(lambda x: divergence(x, teacher, beta), teacher).abs().max() < 1e-12


@pytest.mark.parametrize("beta", BETAS)
def test_gradients_agree_with_differences(beta: float) -> None:
    teacher = logits(6)
    assert torch.autograd.gradcheck(lambda x: divergence(x, teacher, beta), logits(7).requires_grad_())


@pytest.mark.parametrize("beta", BETAS)
def test_banned_tokens_and_certain_teachers_give_finite_numbers(beta: float) -> None:
    """The teacher has all its mass on one token, and both may never sample two others, one of them a likely one."""
    made = torch.randn(2, 8, generator=torch.Generator().manual_seed(8))
    made[0, 3], banned = 200.0, torch.tensor([3, 5])
    student = made[1:].clone().requires_grad_()
    theirs = sampling_logprobs(made[:1] + 100 * torch.eye(8)[:1], temperature=0.5, banned=banned)
    ours = sampling_logprobs(student, temperature=0.5, banned=banned)
    for count in (1, 4, 7, 8):
        ids = likeliest(theirs, count)
        found = generalised_jsd(class_logprobs(ours, ids), class_logprobs(theirs, ids), beta)
        (gradient,) = torch.autograd.grad(found.sum(), student, retain_graph=True)
        assert bool(torch.isfinite(found).all())
        assert bool(torch.isfinite(gradient).all())
        assert float(gradient[0, 3]) == float(gradient[0, 5]) == 0.0


def without_the_others(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """Reverse KL of the teacher's likeliest tokens alone, as verl had it at first. [n]"""
    ours, theirs = student.log_softmax(-1), teacher.log_softmax(-1)
    ids = likeliest(theirs, TOP)
    chosen = ours.gather(-1, ids)
    return (chosen.exp() * (chosen - theirs.gather(-1, ids))).sum(-1)


def test_without_the_class_of_others_the_reverse_kl_leads_away_from_the_teacher() -> None:
    """https://github.com/verl-project/verl/pull/5041: mass leaves the tokens that are compared. A student that equals
    its teacher has a lower loss then, at a larger distance; with the class of others it stays, and one that is far
    away comes near."""
    teacher = logits(9)

    def whole(student: torch.Tensor) -> torch.Tensor:
        return divergence(student, teacher, 1.0, VOCABULARY)

    def compared_mass(student: torch.Tensor) -> torch.Tensor:
        return student.softmax(-1).gather(-1, likeliest(teacher, TOP)).sum(-1)

    def descended(loss: Callable[[torch.Tensor], torch.Tensor], student: torch.Tensor) -> torch.Tensor:
        for _ in range(400):
            student = student - 0.5 * gradient_of(loss, student)
        return student

    away = descended(lambda x: without_the_others(x, teacher), teacher)
    assert bool((without_the_others(away, teacher) < without_the_others(teacher, teacher) - 0.1).all())
    assert bool((whole(away) > 0.2).all()), "a lower loss, and no teacher"
    assert bool((compared_mass(away) < 0.6 * compared_mass(teacher)).all())
    stays = descended(lambda x: divergence(x, teacher, 1.0), teacher)
    torch.testing.assert_close(stays, teacher, atol=1e-9, rtol=0)
    start = torch.zeros_like(teacher)
    near = descended(lambda x: divergence(x, teacher, 1.0), start)
    assert bool((divergence(near, teacher, 1.0) < 0.01 * divergence(start, teacher, 1.0)).all())
    assert bool((whole(near) < 0.5 * whole(start)).all())
    lost = descended(lambda x: without_the_others(x, teacher), start)
    assert bool((whole(lost) > whole(near) + 0.2).all())


def test_chunks_of_tokens_bound_the_memory_and_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind an output head, forward and backward."""
    results: list[tuple[torch.Tensor, torch.Tensor, int]] = []
    for tokens_per_chunk in (TOKENS, 16):
        monkeypatch.setattr(output_head, "LOGITS_PER_CHUNK", tokens_per_chunk * HEAD_VOCABULARY)
        made, others = Made(), Made()
        torch.nn.init.normal_(others.linear.weight)
        with torch.no_grad():
            theirs = others.head.distributions(others.hidden)
            ids = likeliest(theirs, TOP)
            classes = class_logprobs(theirs, ids)

        def compare(logprobs: torch.Tensor, ids: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
            return generalised_jsd(class_logprobs(logprobs, ids), classes, 0.5)

        with LiveBytes("cpu", known=[made.linear.weight, made.hidden, ids, classes]) as live:
            found = made.head(made.hidden, made.targets, comparison=Comparison(compare, (ids, classes))).compared
            assert found is not None
            found.sum().backward()
        assert made.hidden.grad is not None
        results.append((found, made.hidden.grad, live.peak))
    (whole, gradient, most), (chunked, same, peak) = results
    assert torch.equal(chunked, whole)
    assert torch.equal(same, gradient)
    assert peak < most / 5
