"""The mathematics against published values and the house rules."""

from __future__ import annotations

import json
import math
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from asyncrl.algorithms.advantages import grpo, rloo
from asyncrl.algorithms.corrections import Correction, correct
from asyncrl.algorithms.diagnostics import STALENESS_BUCKETS, off_policy_diagnostics, off_policy_report
from asyncrl.algorithms.loading import load_method
from asyncrl.algorithms.losses import ppo, token_weights
from asyncrl.algorithms.ratios import (
    PolicyTokens,
    approximate_proximal,
    geometric_ratio,
    ratio,
    sequence_ratio,
)
from asyncrl.algorithms.selections import m2po
from asyncrl.algorithms.trajectories import Credit, Trajectories
from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.correction import CorrectionConfig
from asyncrl.config.installed_methods import methods
from asyncrl.config.method import BY_SECTION, NEEDS
from asyncrl.config.method import KINDS as METHOD_KINDS
from tests.rigs.tiny import ROOT

pytestmark = pytest.mark.usefixtures("one_thread")
VECTORS = json.loads((ROOT / "tests" / "rigs" / "vectors.json").read_text())
"""The published values."""
LOSS, GIVEN = VECTORS["loss_inputs"], VECTORS["is_inputs"]
MASK = torch.tensor(LOSS["mask"]).bool()
ROW = torch.arange(2)[:, None].expand(2, 4)[MASK]
SYMMETRIC = AlgorithmConfig(clip_ratio_high=0.2, clip_ratio_c=1e9)
KINDS = ("none", "token_tis", "sequence_tis", "geometric_tis", "token_mis", "sequence_mis", "geometric_mis", "icepop")
ESTIMATORS = {
    "grpo": (grpo, AlgorithmConfig()),
    "dr_grpo": (grpo, AlgorithmConfig(norm_adv_by_std=False)),
    "rloo": (rloo, AlgorithmConfig()),
}


def flat(rows: list[list[float]]) -> torch.Tensor:
    """The unmasked tokens of a padded [2, 4]."""
    return torch.tensor(rows)[MASK]


def close(got: torch.Tensor, expected: Any, tolerance: float = 2e-6) -> None:
    torch.testing.assert_close(got, torch.as_tensor(expected), atol=tolerance, rtol=tolerance)


def scored(scores: torch.Tensor, groups: torch.Tensor) -> Trajectories:
    """Trajectories of one token each."""
    return Trajectories(scores=scores, group=groups, row=torch.arange(len(scores)), behaviour_logprobs=scores * 0)


# --- advantages ------------------------------------------------------------------------------------


@pytest.fixture(params=ESTIMATORS)
def estimator(request: pytest.FixtureRequest) -> Any:
    """(estimator, config, published advantages)"""
    return *ESTIMATORS[request.param], torch.tensor(VECTORS[request.param]["adv"])


def test_rows_of_methods_name_their_functions_and_say_what_they_are() -> None:
    for kind in METHOD_KINDS:
        assert methods(kind) or kind in BY_SECTION
        for name, method in methods(kind).items():
            function = load_method(kind, name, kind)
            assert function.__name__ == name or kind in BY_SECTION
            assert function.__doc__, name
            assert method.formula, name
            assert method.needs <= NEEDS.keys(), name


def test_estimators_losses_and_corrections_are_combined_freely_but_for_three_rules() -> None:
    for (estimator, advantage), (name, loss), kind in product(
        methods("advantage").items(), methods("policy_loss").items(), KINDS
    ):
        weighs_twice = loss.weighs_behaviour and kind != "none"
        has_no_values = "critic" in advantage.needs and "inserted" in loss.needs
        has_no_logprobs = "proximal" in advantage.needs and loss.defaults.get("proximal") == "target"
        section = {"adv_estimator": estimator, "policy_loss": name, "correction": {"kind": kind}}
        try:
            AlgorithmConfig.model_validate(section)
            is_refused = False
        except ValidationError:
            is_refused = True
        assert is_refused == (weighs_twice or has_no_values or has_no_logprobs), section


def test_published_advantages(estimator: Any) -> None:
    estimate, config, expected = estimator
    scores = torch.tensor(VECTORS["scores"]["s"])
    groups = torch.tensor([ord(uid) for uid in VECTORS["scores"]["uid"]])
    for order in (torch.arange(6), torch.tensor([4, 0, 5, 2, 1, 3])):
        close(estimate(scored(scores[order], groups[order]), config).advantages, expected[order])


def test_no_spread_is_exactly_no_advantage_and_an_unscored_row_takes_no_part(estimator: Any) -> None:
    estimate, config, _ = estimator
    nan = float("nan")
    for scores in ([3.0], [0.1, 0.1, 0.1], [1e6 + 0.1] * 7, [-0.7] * 11, [0.0, 0.0]):
        group = torch.zeros(len(scores), dtype=torch.long)
        advantages = estimate(scored(torch.tensor(scores), group), config).advantages
        assert advantages.tolist() == [0.0] * len(scores)
    scores_of_rows = torch.tensor([1.0, nan, 0.0, 0.0, nan, 5.0, nan])
    advantages = estimate(scored(scores_of_rows, torch.tensor([0, 0, 0, 0, 1, 1, 2])), config).advantages
    assert advantages[[1, 4, 5, 6]].tolist() == [0.0] * 4
    alone = estimate(scored(torch.tensor([1.0, 0.0, 0.0]), torch.zeros(3, dtype=torch.long)), config).advantages
    assert advantages[[0, 2, 3]].tolist() == alone.tolist()


# --- losses ------------------------------------------------------------------------------------------


def tokens(logprobs: torch.Tensor) -> PolicyTokens:
    old = flat(LOSS["old_logp"])
    return PolicyTokens(logprobs, old, old, flat(LOSS["adv"]), ROW)


@pytest.mark.parametrize(
    ("vector", "config"),
    [
        ("ppo", SYMMETRIC),
        ("dapo_clip_higher", AlgorithmConfig(clip_ratio_c=1e9)),
        ("dual_clip", AlgorithmConfig(clip_ratio_high=0.2, clip_ratio_c=3.0)),
    ],
)
def test_published_losses_in_every_aggregation(vector: str, config: AlgorithmConfig) -> None:
    expected = VECTORS[vector]
    token_loss = ppo(tokens(flat(LOSS["logp"])), config).token_loss
    close(token_loss, flat(expected["token_loss"]))
    for mode, name, length in (
        ("token-mean", "token_mean", 4),
        ("seq-mean-token-mean", "seq_mean_token_mean", 4),
        ("seq-mean-token-sum-norm", "seq_mean_token_sum_norm", 2),
    ):
        weights = token_weights(ROW, mode, max_response_length=length)
        close((weights * token_loss).sum(), expected[name])


def test_rows_without_tokens_do_not_count() -> None:
    row = torch.tensor([0, 0, 7, 7, 7])
    close(token_weights(row, "seq-mean-token-mean", max_response_length=9), [1 / 4, 1 / 4, 1 / 6, 1 / 6, 1 / 6])
    close(token_weights(row, "seq-mean-token-sum-norm", max_response_length=10), [1 / 20] * 5)
    assert token_weights(row[:0], "seq-mean-token-mean", max_response_length=9).shape == (0,)


def test_gradients_vanish_where_clipped() -> None:
    logprobs = flat(LOSS["logp"]).requires_grad_()
    policy = ppo(tokens(logprobs), AlgorithmConfig())
    (gradient,) = torch.autograd.grad(policy.token_loss.sum(), logprobs)
    r, a = flat(LOSS["ratio"]), flat(LOSS["adv"])
    clipped = ((a > 0) & (r > 1.28)) | ((a < 0) & (r < 0.8)) | ((a < 0) & (r > 3.0))
    assert clipped.tolist() == [True, False, False, True, True, False, True]
    assert gradient[clipped].tolist() == [0.0] * 4
    close(gradient[~clipped], (-a * r)[~clipped])
    assert torch.stack(list(policy.indicators.values())).any(0).tolist() == clipped.tolist()
    proximal = flat(LOSS["old_logp"]).requires_grad_()  # there the gradient is the policy gradient
    (gradient,) = torch.autograd.grad(ppo(tokens(proximal), AlgorithmConfig()).token_loss.sum(), proximal)
    close(gradient, -a)


# --- corrections ----------------------------------------------------------------------------------


def per_row(values: list[Any]) -> torch.Tensor:
    return torch.tensor(values)[ROW]


def off_policy(
    log_ratios: torch.Tensor | None = None, row: torch.Tensor = ROW, advantages: torch.Tensor | None = None
) -> PolicyTokens:
    """Tokens of two rows whose pi_proximal / pi_behaviour is given; the target is the proximal policy."""
    proximal = flat(GIVEN["log_ratio"]) if log_ratios is None else log_ratios
    return PolicyTokens(
        logprobs=proximal - 3.0,
        proximal_logprobs=proximal - 3.0,
        behaviour_logprobs=torch.full_like(proximal, -3.0),
        advantages=torch.ones_like(proximal) if advantages is None else advantages,
        row=row,
    )


def corrected(kind: str, tokens: PolicyTokens | None = None, **settings: Any) -> Correction:
    config = CorrectionConfig.model_validate({"kind": kind, **settings})
    return correct(off_policy() if tokens is None else tokens, config)


def masked(kind: str, tokens: PolicyTokens, **settings: Any) -> list[bool]:
    config = CorrectionConfig.model_validate({"kind": "none", "masks": [{"kind": kind, **settings}]})
    correction = correct(tokens, config)
    assert correction.weights.tolist() == (~correction.masked).float().tolist()
    assert correction.masked_by.keys() == {kind}
    return correction.masked.tolist()


def test_ratios_of_tokens_and_trajectories() -> None:
    tokens = off_policy()
    log_ratios = tokens.proximal_logprobs - tokens.behaviour_logprobs
    close(ratio(tokens.proximal_logprobs, tokens.behaviour_logprobs), flat(GIVEN["ratio"]))
    close(sequence_ratio(log_ratios, ROW), per_row(VECTORS["tis_seq_C2"]["seq_ratio"]), 1e-5)
    close(geometric_ratio(log_ratios, ROW), per_row(VECTORS["geo_ratio"]["g"]))
    assert torch.isfinite(ratio(torch.tensor([500.0]), torch.tensor([-500.0]))).all()
    assert torch.isfinite(sequence_ratio(torch.ones(1000), torch.zeros(1000, dtype=torch.long))).all()


@pytest.mark.parametrize(
    ("kind", "settings", "expected"),
    [
        ("none", {}, torch.ones(7)),
        ("token_tis", {}, flat(VECTORS["tis_token_C2"]["w"])),
        ("sequence_tis", {}, per_row(VECTORS["tis_seq_C2"]["w"])),
        ("geometric_tis", {}, per_row(VECTORS["geo_ratio"]["g"]).clamp_max(2.0)),
        ("token_mis", {}, flat(VECTORS["mis_token_0.5_2"]["w"])),
        ("sequence_mis", {}, per_row(VECTORS["mis_seq_0.5_2"]["w"])),
        ("geometric_mis", {"lower": 0.5, "upper": 2.0}, per_row([0.0, VECTORS["geo_ratio"]["g"][1]])),
        ("icepop", {}, flat(VECTORS["icepop_0.5_5"]["w"])),
    ],
)
def test_published_weights(kind: str, settings: dict[str, float], expected: torch.Tensor) -> None:
    correction = corrected(kind, **settings)
    close(correction.weights, expected)
    assert not correction.weights.requires_grad
    assert correction.masked.tolist() == (expected == 0).tolist()
    assert bool(correction.truncated.any()) == kind.endswith("_tis")


def test_a_trajectorys_ratio_is_bounded_after_its_tokens_are_added_up() -> None:
    """s = exp(clamp(sum d, -20, 20)) and g = exp(sum d / n): neither from differences that are clamped already."""
    tokens = off_policy(torch.tensor([40.0, -45.0, 30.0, 30.0]), torch.tensor([0, 0, 1, 1]))
    close(corrected("sequence_tis", tokens).weights, [math.exp(-5.0)] * 2 + [2.0] * 2)
    close(corrected("geometric_tis", tokens).weights, [math.exp(-2.5)] * 2 + [2.0] * 2)
    close(sequence_ratio(torch.tensor([30.0, 30.0]), ROW[:2]), [math.exp(20.0)] * 2)
    close(geometric_ratio(torch.tensor([30.0, 30.0]), ROW[:2]), [math.exp(20.0)] * 2)
    assert masked("sequence", tokens) == masked("geometric", tokens) == [True] * 4


def test_asymmetric_bounds_act_on_the_right_side() -> None:
    tokens = off_policy(torch.log(torch.tensor([0.25, 0.9, 3.0])), torch.tensor([0, 1, 2]))
    assert corrected("token_mis", tokens, lower=0.8, upper=4.0).masked.tolist() == [True, False, False]
    assert corrected("sequence_mis", tokens, lower=0.2, upper=2.0).masked.tolist() == [False, False, True]


def test_decoupled_ppo() -> None:
    given = VECTORS["decoupled_ppo"]
    tokens = PolicyTokens(
        logprobs=flat(LOSS["logp"]),
        proximal_logprobs=flat(given["prox_logp"]),
        behaviour_logprobs=flat(given["behave_logp"]),
        advantages=flat(LOSS["adv"]),
        row=ROW,
    )
    weights = corrected("token_tis", tokens, upper=1e9).weights
    close(weights, flat(given["behave_weight"]))
    place = token_weights(ROW, "token-mean", max_response_length=4)
    token_loss = ppo(tokens, SYMMETRIC).token_loss
    close((place * weights * token_loss).sum(), given["token_mean"])
    dropped = corrected("token_mis", tokens, lower=0.0, upper=1.2).weights
    close((place * dropped * token_loss).sum(), VECTORS["decoupled_ppo_masked_upper1.2"]["token_mean"])


# --- masks --------------------------------------------------------------------------------------------


def test_trajectories_out_of_bounds_are_masked() -> None:
    kept = per_row(VECTORS["seq_mask_tis_geo_0.99_1.01_then_token"]["keep"])
    assert masked("geometric", off_policy()) == (~kept).tolist()
    assert masked("geometric", off_policy(), lower=0.5, upper=2.0) == (ROW == 0).tolist()
    assert masked("sequence", off_policy(), lower=0.4, upper=2.0) == (ROW == 0).tolist()
    assert masked("sequence", off_policy(), lower=0.4, upper=21.0) == [False] * 7


def test_veto_drops_the_trajectory_of_one_catastrophic_token() -> None:
    log_ratios = torch.tensor([0.0, -9.3, 0.0, 0.0, 9.0])
    tokens = off_policy(log_ratios, torch.tensor([4, 4, 7, 2, 2]))
    assert masked("veto", tokens) == [True, True, False, False, False]
    assert masked("veto", tokens, upper=100.0) == [True, True, False, True, True]
    assert masked("veto", tokens, lower=1e-5) == [False] * 5


def test_off_policy_sequence_mask() -> None:
    given = VECTORS["opsm_delta_.5"]
    assert masked("opsm", tokens(flat(LOSS["logp"]))) == per_row(given["drop"]).tolist()
    left = off_policy(torch.tensor([-1.0, -0.4, -1.0, 0.0, 1.0]), torch.tensor([0, 0, 1, 2, 2]))
    assert masked("opsm", left) == [False] * 5, "good samples are never dropped"
    bad = off_policy(torch.tensor([-1.0, -0.4, -1.0, 0.0, 1.0]), torch.tensor([0, 0, 1, 2, 2]), -torch.ones(5))
    assert masked("opsm", bad) == [True, True, True, False, False]
    assert masked("opsm", bad, upper=0.8) == [False, False, True, False, False]


def test_total_variation_mask() -> None:
    given, moved = VECTORS["dppo_tv_.2"], tokens(flat(LOSS["logp"]))
    assert masked("dppo_tv", moved) == torch.tensor(given["masked"])[MASK].tolist()
    assert masked("dppo_tv", moved, upper=0.5) == (flat(given["diff"]) < -0.2).tolist()
    assert masked("dppo_tv", moved, upper=0.1, lower=0.3) == [True, False, False, True, False, False, False]


def test_m2po_drops_the_fewest_tokens() -> None:
    given = VECTORS["m2po"]
    delta = torch.tensor(given["delta"])

    def dropped(differences: torch.Tensor, threshold: float) -> torch.Tensor:
        n = len(differences)
        nothing, one_each = torch.zeros(n), torch.arange(n)
        t = Trajectories(nothing, one_each, one_each, nothing, proximal_logprobs=differences)
        return m2po(
            t,
            Credit(nothing),
            AlgorithmConfig.model_validate({"selections": ["m2po"], "m2po": {"threshold": threshold}}),
        )

    outliers = dropped(delta, given["threshold"])
    assert int(outliers.sum()) == given["num_dropped"]
    assert outliers.tolist() == [False, False, True, False]
    assert int(dropped(delta, given["threshold2"]).sum()) == given["num_dropped2"]
    assert dropped(torch.tensor([2.0, 3.0]), 0.01).tolist() == [False, True], "one token stays"
    correction = correct(off_policy(delta, torch.arange(4)), CorrectionConfig(), {"m2po": outliers})
    close(correction.weights, torch.where(outliers, 0.0, delta.exp()))


def test_masks_compose_with_each_other_and_with_weights() -> None:
    tokens = off_policy()
    correction = corrected(
        "token_tis", tokens, masks=[{"kind": "geometric", "upper": 3, "lower": 0.8}, {"kind": "opsm"}]
    )
    close(correction.weights, torch.where(ROW == 0, flat(VECTORS["tis_token_C2"]["w"]), 0.0))
    assert correction.masked.tolist() == (ROW == 1).tolist()
    assert not (correction.truncated & correction.masked).any()
    assert correction.masked_by["opsm"].tolist() == [False] * 7


@pytest.mark.parametrize("kind", KINDS)
def test_on_policy_tokens_have_weight_one_and_no_weight_is_infinite(kind: str) -> None:
    correction = corrected(kind, off_policy(torch.zeros(7)))
    assert correction.weights.tolist() == [1.0] * 7
    assert not (correction.masked | correction.truncated).any()
    for extreme in (float("inf"), 1e30, 500.0):
        tokens = off_policy(torch.tensor([extreme, -extreme, 0.0]), torch.tensor([0, 1, 2]))
        assert torch.isfinite(corrected(kind, tokens).weights).all()


# --- settings that make no sense ----------------------------------------------------------------------


MASKS_AND_KINDS: list[tuple[dict[str, Any], str]] = [
    ({"kind": "none", "upper": 2.0}, r"none has no lower and upper. Leave them out"),
    ({"kind": "token_tis", "lower": 0.5}, r"no lower. Set algorithm.correction.upper"),
    ({"kind": "token_mis", "upper": 0.9}, r"\[0.5, 0.9\], which leaves out 1"),
    ({"masks": [{"kind": "opsm", "lower": 0.1}]}, "opsm mask has no lower. Set upper"),
    ({"masks": [{"kind": "geometric", "lower": 1.5}]}, r"\[1.5, 1.01\], which leaves out 1"),
    ({"masks": [{"kind": "veto"}, {"kind": "veto"}]}, "names veto twice"),
    ({"kind": "sequence_mis", "masks": [{"kind": "sequence"}]}, "both reject by the sequence ratio"),
]
SENSELESS: list[tuple[dict[str, Any], str]] = [
    *(({"correction": correction}, message) for correction, message in MASKS_AND_KINDS),
    ({"proximal": "behaviour"}, r"kind token_tis, .*Set algorithm.proximal=recompute, or"),
    ({"proximal": "behaviour", "correction": {"kind": "none", "masks": [{"kind": "veto"}]}}, "masks veto"),
    ({"proximal": "linear", "selections": ["m2po"]}, "m2po needs .*Set algorithm.proximal=recompute"),
]


@pytest.mark.parametrize(("algorithm", "message"), SENSELESS)
def test_senseless_combinations_are_refused(algorithm: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=f"(?s){message}"):
        AlgorithmConfig.model_validate(algorithm)


# --- proximal approximations --------------------------------------------------------------------------


def test_loglinear_and_linear_proximal_policies() -> None:
    given = VECTORS["prox_loglinear"]
    logprobs, behaviour = flat(LOSS["logp"]).requires_grad_(), flat(VECTORS["decoupled_ppo"]["behave_logp"])
    version = given["v_theta"] - 1
    versions = torch.full((7,), given["v_behave"], dtype=torch.int32)
    proximal = approximate_proximal("loglinear", logprobs, behaviour, versions, version)
    close(proximal, flat(given["prox"]))
    assert not proximal.requires_grad
    linear = approximate_proximal("linear", logprobs, behaviour, versions, version)
    close(linear.exp(), (behaviour.exp() + 2 * logprobs.detach().exp()) / 3)
    for kind in ("loglinear", "linear"):
        fresh = approximate_proximal(
            kind, logprobs, behaviour, torch.tensor([version, version + 1, -1] + [version] * 4), version
        )
        close(fresh, behaviour)
    assert approximate_proximal("behaviour", logprobs, behaviour, versions, version) is behaviour
    assert approximate_proximal("target", logprobs, behaviour, versions, version).tolist() == logprobs.tolist()


# --- diagnostics --------------------------------------------------------------------------------------


def test_diagnostics() -> None:
    same = np.array([-1.0, -2.0, -0.1], np.float32)
    nothing = off_policy_diagnostics(same, same)
    assert (nothing["ess"], nothing["mismatch_kl_k1"], nothing["mismatch_kl_k3"]) == (1.0, 0.0, 0.0)
    assert (nothing["ratio_max"], nothing["ratio/p01"], nothing["ratio/p99"]) == (1.0, 1.0, 1.0)
    behind = off_policy_diagnostics(np.array([-1.0, 0.0]), np.array([-2.0, 0.0]))
    e = float(np.exp(1.0))
    assert behind["ess"] == pytest.approx((1 + e) ** 2 / (2 * (1 + e**2)), rel=1e-6)
    assert behind["mismatch_kl_k1"] == pytest.approx(-0.5)
    assert behind["mismatch_kl_k3"] == pytest.approx((e - 2) / 2, rel=1e-6)
    assert behind["ratio/p50"] == pytest.approx((1 + e) / 2)
    assert off_policy_diagnostics(same[:0], same[:0]) == {}


def test_diagnostics_by_staleness_are_those_of_the_tokens_of_that_age() -> None:
    rng = np.random.default_rng(0)
    learner, behaviour = rng.normal(-2, 0.3, 600), rng.normal(-2, 0.3, 600)
    staleness = rng.integers(0, 12, 600)
    masked = (rng.random(600) < 0.2).astype(np.float32)
    report = off_policy_report(learner, behaviour, staleness, {"mask_fraction": masked})
    assert {key.partition("/")[0] for key in report if key.startswith("staleness_")} == {
        f"staleness_{name}" for name in STALENESS_BUCKETS
    }
    for name, here in (("3", staleness == 3), ("5-8", (staleness >= 5) & (staleness <= 8)), ("9+", staleness >= 9)):
        alone = off_policy_diagnostics(learner[here], behaviour[here])
        assert {key: report[f"staleness_{name}/{key}"] for key in alone} == alone
        assert report[f"staleness_{name}/tokens"] == here.sum()
        assert report[f"staleness_{name}/mask_fraction"] == masked[here].mean()
    assert report["mask_fraction"] == pytest.approx(float(masked.mean()))
