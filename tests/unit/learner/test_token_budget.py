"""A pass without memory begins again with fewer tokens, and the step is what it would have been."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch

from asyncrl.config.schema import RunConfig
from asyncrl.errors import BadStateError, RestartError
from asyncrl.processing.processor import PromptProcessor
from learner.ranks.group import Ranks
from learner.training.packing import plan_micro_batches
from learner.training.roles import Critic, Roles
from learner.training.step import LearnerStep, NotFiniteError
from learner.training.token_budget import TokenBudget
from tests.rigs.made_up_batch import KeepGradients, made_up_batch

pytestmark = pytest.mark.usefixtures("one_thread")
MakeConfig = Callable[..., RunConfig]


class SmallMemory(KeepGradients):
    """An engine whose model raises CUDA's error above `room` tokens; with `late`, only after it has gradients."""

    room = 1 << 30
    late = False
    failures = 0

    def prepare(self) -> None:
        super().prepare()
        self.model.model.register_forward_pre_hook(self._check, with_kwargs=True)

    def _check(self, _: Any, __: Any, inputs: dict[str, Any]) -> None:
        tokens = inputs["input_ids"].shape[1]
        if tokens > self.room and (not self.late or any(p.grad is not None for p in self.trained)):
            self.failures += 1
            raise torch.OutOfMemoryError(f"CUDA out of memory: {tokens} tokens")


def engine_and_step(config: RunConfig, ranks: Ranks | None = None) -> tuple[SmallMemory, LearnerStep]:
    engine = SmallMemory(config.model_settings, config.learner.optim, 1)
    engine.prepare()
    critic = Critic(config.critic_settings, config.critic, 1) if "critic" in config.algorithm.needs else None
    if critic:
        critic.prepare()
    return engine, LearnerStep(Roles(engine, critic, ranks=ranks or Ranks()), config.step_settings)


@pytest.mark.parametrize("algorithm", [{}, {"updates_per_batch": 2}, {"adv_estimator": "gae"}], ids=str)
@pytest.mark.parametrize("late", [False, True])
def test_the_step_is_that_of_a_smaller_budget(
    make_config: MakeConfig, algorithm: dict[str, Any], late: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where it fails after some micro-batches have left their gradients: these do not count twice."""
    config = make_config(
        batch={"prompts_per_step": 8, "tokens_per_microbatch": 120}, data={"max_prompt_length": 64}, algorithm=algorithm
    )
    batch = made_up_batch(config, PromptProcessor(config.model))
    engine, step = engine_and_step(config)
    expected = step(batch, 3)
    gradients = engine.gradients

    engine, step = engine_and_step(config)
    engine.room, engine.late = 64, late
    with caplog.at_level(logging.WARNING):
        found = step(batch, 3)
    assert engine.failures > 0
    assert found.pop("memory/failures") == engine.failures
    assert found.pop("memory/tokens_per_microbatch") <= 60
    assert f"begins again with a budget of {step.budget.tokens}" in caplog.text
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-5, nan_ok=True)
    largest = max(float(gradient.norm()) for gradient in gradients.values())
    for name, gradient in gradients.items():
        torch.testing.assert_close(engine.gradients[name], gradient, rtol=1e-3, atol=1e-5 * largest, msg=name)
    failures = engine.failures
    assert step(batch, 3)["memory/failures"] == 0, "the budget stays"
    assert engine.failures == failures


def test_a_row_that_does_not_fit_stops_the_run_with_its_numbers(make_config: MakeConfig) -> None:
    config = make_config()
    batch = made_up_batch(config, PromptProcessor(config.model))
    engine, step = engine_and_step(config)
    rows = plan_micro_batches(batch.train_groups, 1)
    longest = max(sum(group.num_tokens for group in part) for part in rows)
    engine.room = longest - 1
    with pytest.raises(BadStateError, match=rf"up to {longest} tokens .*single row, the longest of \d+ prompt and \d+"):
        step(batch, 3)
    assert all(p.grad is None for p in engine.trained)


def test_an_optimiser_step_without_memory_stops_the_run_with_what_helps(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config()
    engine, step = engine_and_step(config)

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")

    monkeypatch.setattr(engine, "optimizer_step", fail)
    says = r"step 4 .* optimiser's step \(CUDA .* 2\.00 GiB\.\), .* learner\.cpu_offload=true"
    with pytest.raises(BadStateError, match=says) as stopped:
        step(made_up_batch(config, PromptProcessor(config.model)), 3)
    assert not isinstance(stopped.value, NotFiniteError)


def test_several_ranks_begin_the_step_again_in_new_processes(make_config: MakeConfig) -> None:
    """Without a run directory nobody could go on: the run ends."""
    config = make_config()
    engine, step = engine_and_step(config)
    groups = made_up_batch(config, PromptProcessor(config.model)).train_groups

    def fail(_: int) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    def two_ranks(budget: TokenBudget) -> TokenBudget:
        budget._roles = Roles(engine, ranks=Ranks(size=2))
        return budget

    with pytest.raises(BadStateError, match=r"Start again with batch.tokens_per_microbatch=\d+"):
        two_ranks(TokenBudget(step.roles, 512)).run(fail, groups, "step 1")
    found = [512]
    config.run_path.mkdir()
    while True:
        budget = TokenBudget(step.roles, 512)
        budget.keep_in_run(config.run_path, config.batch, config.learner)
        assert budget.tokens == found[-1]
        with pytest.raises((RestartError, BadStateError)) as caught:
            two_ranks(budget).run(fail, groups, "step 1")
        if caught.type is BadStateError:
            assert "each is a single row, the longest of" in str(caught.value)
            break
        found.append(budget.tokens)
        assert f"with a budget of {budget.tokens}" in str(caught.value)
    assert len(found) >= 3
    assert all(after <= before // 2 for before, after in pairwise(found))
    changed = config.model_copy(update={"learner": config.learner.model_copy(update={"gradient_checkpointing": True})})
    budget = TokenBudget(step.roles, 512)
    budget.keep_in_run(changed.run_path, changed.batch, changed.learner)
    assert budget.tokens == 512, "with other settings there may be room"


def test_a_smaller_budget_holds_for_the_processes_that_come(make_config: MakeConfig) -> None:
    config = make_config(batch={"prompts_per_step": 8}, data={"max_prompt_length": 64})
    config.run_path.mkdir()
    batch = made_up_batch(config, PromptProcessor(config.model))
    engine, step = engine_and_step(config)
    step.budget.keep_in_run(config.run_path, config.batch, config.learner)
    engine.room = 200
    step(batch, 3)
    again = TokenBudget(step.roles, config.batch.microbatch_tokens)
    again.keep_in_run(config.run_path, config.batch, config.learner)
    assert again.tokens == step.budget.tokens < config.batch.microbatch_tokens
