"""batch.tokens_per_microbatch=auto: the number that is chosen fits, a larger one does not, and it changes no result."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from asyncrl.config.schema import RunConfig, changed
from asyncrl.errors import UserError
from asyncrl.memory_plan import GIB, token_choice
from asyncrl.memory_plan.lines import CONTEXT_BYTES
from asyncrl.memory_plan.plan import check_plan, longest_sequence, make_plan
from asyncrl.memory_plan.rehearsal import NoPlanError
from asyncrl.memory_plan.token_choice import KEY, settle_tokens, token_steps
from asyncrl.processing.processor import PromptProcessor
from learner.loop import trainer
from learner.loop.trainer import Trainer, with_token_budget
from learner.ranks.group import Ranks
from learner.training.token_budget import BUDGET_FILE, TokenBudget
from tests.rigs.made_up_batch import made_up_batch

pytestmark = pytest.mark.usefixtures("one_thread")
MakeConfig = Callable[..., RunConfig]
CPU = torch.device("cpu")
AUTO: dict[str, Any] = {
    "batch": {"prompts_per_step": 16, "tokens_per_microbatch": "auto"},
    "learner": {"device": "cpu"},
    "rollout": {"device": "cpu"},
}


def needed(config: RunConfig, tokens: int) -> int:
    return make_plan(changed(config, {KEY: tokens})).phases[0].nbytes


@pytest.mark.parametrize("learner", [{}, {"engine": "fsdp2", "num_processes": 2}], ids=str)
def test_the_largest_number_that_fits_is_chosen(make_config: MakeConfig, learner: dict[str, Any]) -> None:
    check_largest_number(make_config, learner)


def check_largest_number(make_config: MakeConfig, learner: dict[str, Any]) -> None:
    config = make_config(**{**AUTO, "learner": AUTO["learner"] | learner})
    steps = token_steps(config)
    group = config.data.max_prompt_length + config.batch.group_size * config.data.max_response_length
    assert steps[0] == longest_sequence(config.data)
    assert all(before < after <= 2 * before for before, after in pairwise(steps[1:]))
    ranks = config.learner.num_processes
    assert ranks * steps[-2] < config.batch.prompts_per_step * group <= ranks * steps[-1], "more would be useless"

    place = len(steps) // 2
    limit = needed(config, steps[place])
    for nbytes, expected in ((limit, place), (limit - 1, place - 1), (GIB, len(steps) - 1)):
        settled, said = settle_tokens(changed(config, {"gpu_memory.budget_gib": nbytes / GIB}))
        assert settled.batch.tokens_per_microbatch == steps[expected]
        assert said.startswith(f"batch.tokens_per_microbatch: auto is {steps[expected]:,} here")
        assert ("all of a step" in said) == (nbytes == GIB)
    assert needed(config, 2 * steps[place]) > limit
    assert settle_tokens(config, limit)[0].batch.tokens_per_microbatch == steps[place], "as much of a GPU"


def test_a_budget_without_room_for_the_longest_sample_is_refused(make_config: MakeConfig) -> None:
    config = make_config(**AUTO)
    tight = changed(config, {"gpu_memory.budget_gib": (needed(config, longest_sequence(config.data)) - 1) / GIB})
    with pytest.raises(UserError, match=r"gpu_memory\.budget_gib is .* but the learner"):
        check_plan(tight)


def test_without_a_measure_it_is_the_default(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(**{**AUTO, "batch": AUTO["batch"] | {"prompts_per_step": 512}})
    settled, said = settle_tokens(config)
    assert settled.batch.tokens_per_microbatch == 8192
    assert "as there is neither a GPU nor gpu_memory.budget_gib" in said

    def fail(*_: Any) -> None:
        raise NoPlanError("memory cannot be planned for models of the family other")

    monkeypatch.setattr(token_choice, "make_plan", fail)
    settled, said = settle_tokens(config, GIB)
    assert settled.batch.tokens_per_microbatch == 8192
    assert "family other" in said


def test_ranks_choose_by_the_memory_of_the_one_that_has_least(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OfTwo(Ranks):
        def most(self, number: int) -> int:
            return max(number, -3 * GIB)

    rooms: list[int] = []

    def choose(config: RunConfig, room: int) -> tuple[RunConfig, str]:
        assert config.learner.num_processes == 2
        rooms.append(room)
        return changed(config, {KEY: 4096}), "chosen"

    total = 8 * GIB
    monkeypatch.setattr(trainer, "settle_tokens", choose)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=total))
    config = make_config(**{**AUTO, "learner": {"engine": "fsdp2", "device": "cuda:0"}})
    for free in (5 * GIB, 2 * GIB):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, free=free: (free, total))
        settled = with_token_budget(config, torch.device("cuda", 0), OfTwo(size=2))
        assert settled.batch.microbatch_tokens == 4096
    assert rooms == [3 * GIB, 2 * GIB + CONTEXT_BYTES]


def test_a_step_is_that_of_the_number(make_config: MakeConfig) -> None:
    config = make_config(**AUTO)
    tight = changed(config, {"gpu_memory.budget_gib": needed(config, 512) / GIB})
    processor = PromptProcessor(config.model)
    batch = made_up_batch(config, processor)
    found: list[dict[str, float]] = []
    for one in (tight, changed(tight, {KEY: 512})):
        torch.manual_seed(1)
        trainer = Trainer(one, processor, num_rows=64)
        assert trainer.step.budget.tokens == trainer.config.batch.microbatch_tokens == 512
        found += [trainer.step(batch, 0), trainer.step(batch, 1)]
    for chosen, written in zip(found[:2], found[2:], strict=True):
        assert chosen == pytest.approx(written, abs=0, rel=0, nan_ok=True)


def test_what_memory_has_left_of_it_caps_it(make_config: MakeConfig) -> None:
    """Also for a machine that chooses by itself, as long as it chooses more."""
    config = make_config(**AUTO)
    config.run_path.mkdir()
    trainer = Trainer(changed(config, {KEY: 512}), PromptProcessor(config.model), num_rows=64)
    roles = trainer.step.roles
    budget = TokenBudget(roles, 512)
    budget.keep_in_run(config.run_path, config.batch, config.learner)
    assert budget.report() == {"memory/tokens_per_microbatch": 512}

    groups = made_up_batch(config, trainer.processor).train_groups

    def fail_once(tokens: int) -> int:
        if tokens == 512:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return tokens

    less = budget.run(fail_once, groups, "step 1")
    assert (config.run_path / BUDGET_FILE).exists()
    for chosen, expected in ((768, less), (less // 2, less // 2)):
        again = TokenBudget(roles, chosen)
        again.keep_in_run(config.run_path, config.batch, config.learner)
        assert again.tokens == expected


def test_other_values_are_refused(make_config: MakeConfig) -> None:
    for value in (0, -1, "automatic", True, 1.5):
        with pytest.raises(ValueError, match="expected a whole number > 0, or auto"):
            make_config(batch={"tokens_per_microbatch": value})
    with pytest.raises(ValueError, match="settle_tokens"):
        _ = make_config(**AUTO).batch.microbatch_tokens
