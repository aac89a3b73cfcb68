"""Tests of the core that hold for every method, with those of the installed plug-ins."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.load import load_config
from asyncrl.config.schema import RunConfig
from asyncrl.demo.prepare import GRPO
from asyncrl.errors import UserError
from tests.system import test_overlay_steps
from tests.unit.asyncrl import (
    test_advantages,
    test_algorithm_properties,
    test_algorithms,
    test_environment_rules,
    test_kl,
    test_policy_losses,
)
from tests.unit.asyncrl.test_algorithm_properties import (
    Made,
    batches,
    close,
    config_of,
    estimate,
    gradient_by_ratio,
    quick,
)
from tests.unit.learner import test_algorithm_overlays, test_step
from tests.unit.learner.test_step import WHOLE, one_step, prepared

pytestmark = pytest.mark.usefixtures("one_thread")
test_rows_in_another_order = test_advantages.test_rows_in_another_order_get_the_same_advantages
test_a_batch_without_trained_tokens = test_advantages.test_a_batch_without_trained_tokens_has_no_credit
test_rows_name_their_functions = test_algorithms.test_rows_of_methods_name_their_functions_and_say_what_they_are
test_combinations = test_algorithms.test_estimators_losses_and_corrections_are_combined_freely_but_for_three_rules
test_no_kl_in_plain_scores = test_kl.test_estimators_that_read_scores_as_they_are_take_no_kl_from_them
test_turns = test_environment_rules.test_credit_over_turns_needs_several
test_on_policy = test_policy_losses.test_on_policy_the_gradient_is_the_policy_gradient
test_another_row = test_policy_losses.test_a_trajectory_of_another_row_changes_nothing
test_gradients = test_algorithm_properties.test_gradients_agree_with_differences
test_all_combinations = test_algorithm_properties.test_every_estimator_goes_with_every_loss_and_aggregation
test_packing = test_algorithm_properties.test_micro_batches_and_the_order_in_which_they_are_packed_change_nothing
test_order = test_algorithm_properties.test_rows_in_another_order_learn_the_same
test_idle_rows = test_algorithm_properties.test_rows_that_have_no_score_and_train_nothing_change_nothing
test_precision = test_algorithm_properties.test_what_is_decided_before_an_update_is_fp32_without_gradient
test_sums = test_algorithm_properties.test_advantages_of_a_group_add_up_to_zero
test_micro_batches_of_a_step = test_step.test_micro_batching_changes_nothing
test_an_overlay_loads = test_algorithm_overlays.test_an_overlay_is_short_says_what_it_is_and_loads_over_the_demo
test_a_word = test_algorithm_overlays.test_a_word_on_a_runs_own_file_is_that_method_and_nothing_of_the_last_one
test_overlays_of_methods = test_algorithm_overlays.test_every_method_has_an_overlay_that_uses_it
test_overlays_take_steps = test_overlay_steps.test_every_overlay_takes_steps_whose_numbers_are_finite


def test_a_token_baseline_costs_one_forward_pass(make_config: Callable[..., RunConfig]) -> None:
    _, engine, _ = one_step(make_config(batch=WHOLE, algorithm={"adv_estimator": "optimal_token_baseline"}))
    assert engine.passes == [False, True]


def test_pruned_trajectories_are_not_computed(make_config: Callable[..., RunConfig]) -> None:
    def step(*selections: str) -> tuple[dict[str, float], torch.Tensor]:
        settings = {"selections": selections, "entropy_coeff": 0.0, "loss_agg_mode": "seq-mean-token-mean"}
        metrics, engine, _ = one_step(make_config(batch=WHOLE, algorithm=settings))
        assert engine.logprobs.grad is not None
        return metrics, engine.logprobs.grad

    _, plain = step()
    metrics, of_best = step("cppo")
    kept = 1 - metrics["mask_fraction_cppo"]
    assert len(of_best) == round(kept * len(plain)) < len(plain), "what is pruned is not even computed"
    batch = prepared(make_config())[1]
    rows = sum(max(len(group.completions) // 2, 1) for group in batch.train_groups)
    weight = 1 / (rows * max(batch.trained.row.bincount()).item())
    assert float(of_best.abs().min()) == 0 or float(of_best.abs().max()) > weight, "denominators are those that stay"


@given(batches(shortest=1))
@quick
def test_length_weighted_advantages_of_opo_add_up_to_zero(made: Made) -> None:
    t = made.trajectories()
    weighted = estimate("opo", made).advantages[t.lengths.cumsum(0) - 1] * t.lengths
    close(torch.zeros(4).index_add(0, t.group, weighted), torch.zeros(4), 1e-4)


@given(batches(shortest=1), st.floats(0.25, 4.0))
@quick
def test_the_scale_of_rewards_is_nothing_to_maxrl(made: Made, scale: float) -> None:
    scaled = Made(made.group, tuple(score * scale for score in made.scores), made.tokens)
    close(estimate("maxrl", scaled).advantages, estimate("maxrl", made).advantages, 2e-4)


@given(st.sampled_from([-2.0, -0.5, 0.5, 2.0]), st.floats(-1.5, 1.5))
@quick
def test_weights_of_aspo_act_on_the_right_side(advantage: float, log_ratio: float) -> None:
    ratio, config = float(torch.tensor(log_ratio).exp()), config_of("grpo", "ppo", "token-mean")
    low, high = 1 - config.clip_ratio_low, 1 + config.clip_ratio_high
    if min(abs(ratio - bound) for bound in (low, high, config.clip_ratio_c)) < 1e-4:
        return
    assert gradient_by_ratio("aspo", advantage, log_ratio) * advantage <= 0, "never the wrong way"
    expected = 0.0 if ratio > high else min(1 / ratio, config.clip_ratio_c)
    if advantage > 0:
        assert gradient_by_ratio("aspo", advantage, log_ratio) == pytest.approx(-advantage * expected, rel=1e-5)


@pytest.mark.parametrize("loss", ["luspo", "vespo", "gmpo"])
def test_a_trajectory_that_loses_its_old_tokens_is_not_judged_as_a_whole(loss: str) -> None:
    with pytest.raises(UserError, match=f"computed from all of them: algorithm.policy_loss {loss}. Set learner"):
        load_config(GRPO, ["learner.on_stale=mask", f"algorithm.policy_loss={loss}"])
