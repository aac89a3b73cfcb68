"""Losses that learn from demonstrations against the published values, and their schedules."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from asyncrl.algorithms.corrections import correct
from asyncrl.algorithms.loading import load_method
from asyncrl.algorithms.losses import PolicyLoss, token_weights, update_weights
from asyncrl.algorithms.ratios import PolicyTokens
from asyncrl.algorithms.trajectories import Credit, Trajectories
from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.correction import CorrectionConfig, MaskConfig
from asyncrl.config.installed_methods import methods
from asyncrl_plugins.demonstrations.settings import (
    ChordConfig,
    DemonstrationConfig,
    HintConfig,
    SuccessGateConfig,
    UftConfig,
)
from tests.rigs.provenance import provenance_of
from tests.rigs.tiny import ROOT

pytestmark = pytest.mark.usefixtures("one_thread")
VECTORS = json.loads((ROOT / "tests" / "rigs" / "vectors.json").read_text())
HYBRIDS = [name for name, method in methods("policy_loss").items() if "inserted" in method.needs]
INSERTED = torch.tensor([True, True, False, False])
"""Two tokens of a demonstration, log-probs -0.2 and -1.6; two sampled ones, whose ratios are e^0.1 and 1."""
LOGPROBS = torch.tensor([-0.2, -1.6, -0.6, -0.3])


def tokens(credit: tuple[float, float] = (0.0, -0.5), **replaced: Any) -> PolicyTokens:
    """`credit`: advantages of the demonstration and of what was sampled."""
    columns: dict[str, Any] = {
        "logprobs": LOGPROBS,
        "proximal_logprobs": torch.tensor([-0.2, -1.6, -0.7, -0.3]),
        "behaviour_logprobs": torch.tensor([0.0, 0.0, -0.7, -0.3]),
        "advantages": torch.tensor(credit).repeat_interleave(2),
        "row": torch.tensor([0, 0, 1, 1]),
        "provenance": provenance_of(torch.tensor([0, 0, 1, 1]), INSERTED),
        "entropies": torch.tensor([0.25, 0.75, 1.5, 1.5]),
        "scores": torch.ones(4),
    }
    return PolicyTokens(**(columns | replaced))


def made(**settings: Any) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate(settings)


def loss_of(name: str, of: PolicyTokens, **settings: Any) -> tuple[PolicyLoss, AlgorithmConfig]:
    config = AlgorithmConfig(policy_loss=name, **settings)
    return load_method("policy_loss", name, "policy_loss")(of, config), config


def total(name: str, of: PolicyTokens, *, length: int = 4, **settings: Any) -> float:
    """The loss of an update of these tokens alone."""
    loss, config = loss_of(name, of, **settings)
    assert of.provenance is not None
    weights = update_weights(of.row, of.row * 0, of.provenance.is_inserted, config, max_response_length=length).loss
    return float((weights * loss.token_loss).sum())


def close(got: torch.Tensor | float, expected: Any, tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(
        torch.as_tensor(got), torch.as_tensor(expected, dtype=torch.float32), atol=tolerance, rtol=tolerance
    )


def gradient(name: str, of: PolicyTokens, **settings: Any) -> torch.Tensor:
    """Of the tokens' losses by their own log-probs."""
    loss, _ = loss_of(name, of, **settings)
    return torch.autograd.grad(loss.token_loss.sum(), of.logprobs)[0]


# --- published values ----------------------------------------------------------------------------------


def test_schedules() -> None:
    for step, mu in VECTORS["chord_mu"]["v"].items():
        assert ChordConfig().mu(int(step)) == pytest.approx(mu, abs=1e-12)
    for step, probability in VECTORS["uft_hint_prob"]["v"].items():
        assert HintConfig().probability(int(step)) == pytest.approx(probability, abs=1e-12)
    assert HintConfig().probability(301) == 0, "hints end"


def test_chord() -> None:
    given = VECTORS["chord_phi_loss"]
    loss, config = loss_of("chord_phi", tokens(), clip_ratio_high=0.2)
    assert loss.supervised_weight is not None
    close(loss.supervised_weight[INSERTED], 0.1 * torch.tensor(given["weights"]))
    rl = VECTORS["luffy"]["on_token_loss"]  # the ratios are within the clip: the same surrogate
    close(total("chord_phi", tokens()), 0.9 * sum(rl) / 2 + 0.1 * given["loss"])
    p = torch.tensor(VECTORS["chord_phi"]["p"]).log()
    one = torch.ones(3)
    all_inserted = {"provenance": provenance_of(one.long(), one.bool()), "row": one.long()}
    phi = tokens(
        logprobs=p,
        proximal_logprobs=p,
        advantages=one,
        **all_inserted,
    )
    found, _ = loss_of("chord_phi", phi)
    assert found.supervised_weight is not None
    close(found.supervised_weight, 0.1 * torch.tensor(VECTORS["chord_phi"]["phi"]))
    chord = config.settings_of(ChordConfig)
    assert chord.mu(0) == chord.mu(1000) == 0.1
    for version, mu in ((0, 0.0), (200, 0.5), (1000, 0.02)):
        close(total("chord_mu", tokens(version=version)), (1 - mu) * sum(rl) / 2 + mu * 0.9)
    by_probability = sum(p * -logprob for p, logprob in zip(given["p"], LOGPROBS.tolist(), strict=False)) / 2
    found = total("chord_mu", tokens(version=200), chord_mu={"weighting": "probability"})
    close(found, 0.5 * sum(rl) / 2 + 0.5 * by_probability)


def test_luffy() -> None:
    given = VECTORS["luffy"]
    loss, config = loss_of("luffy", tokens((0.5, -0.5)))
    close(loss.token_loss, given["off_token_loss"] + given["on_token_loss"])
    assert (config.adv_estimator, config.norm_adv_by_std, config.settings_of(DemonstrationConfig).rows) == (
        "grpo",
        False,
        1,
    )
    close(total("luffy", tokens((0.5, -0.5))), given["loss_sum_over_Lconst4_B2"])
    close(total("luffy", tokens((0.5, -0.5)), loss_agg_mode="token-mean"), given["loss_token_mean"])
    shape = VECTORS["luffy_shape"]
    p = torch.tensor(shape["p"]).log().requires_grad_()
    one = torch.ones(3)
    all_inserted = {"provenance": provenance_of(one.long(), one.bool()), "row": one.long()}
    these = tokens(
        logprobs=p,
        proximal_logprobs=one,
        advantages=one,
        **all_inserted,
    )
    loss, _ = loss_of("luffy", these)
    close(loss.token_loss.detach(), -torch.tensor(shape["f"]))
    close(gradient("luffy", these), -torch.tensor(shape["grad_wrt_logp"]))
    assert loss.supervised_weight is not None
    close(loss.supervised_weight, shape["grad_wrt_logp"])


def test_uft() -> None:
    given = VECTORS["uft"]
    loss, config = loss_of("uft", tokens())
    close(loss.token_loss[2:], given["rl_tokens"])
    given_to_groups = config.settings_of(DemonstrationConfig)
    assert (given_to_groups.rows, given_to_groups.hints.parts) == (0, 5)
    assert config.settings_of(UftConfig).coef == 1e-3
    close(total("uft", tokens()), given["loss_beta1em3"])


def test_hpt() -> None:
    """Of a group the gate leaves the demonstration or the sampled rows, and of two groups each counts the same."""
    given = VECTORS["hpt"]
    demonstration, sampled = tokens().of_tokens(INSERTED), tokens().of_tokens(~INSERTED)
    close(total("hpt", demonstration), given["sft"])
    close(total("hpt", sampled), given["rl"])
    config = AlgorithmConfig(policy_loss="hpt")
    gate = config.settings_of(SuccessGateConfig).gate
    assert (config.selections, config.loss_agg_mode, gate) == (("success_gate",), "prompt-mean", 0)
    group = torch.tensor([0, 0, 1, 1, 1, 1])  # six tokens: four of them sampled, in the second group
    of_both = torch.cat([demonstration.logprobs, sampled.logprobs, sampled.logprobs])
    weights = update_weights(group, group, group == 0, config, max_response_length=9).loss
    close(weights, [1 / 4, 1 / 4, 1 / 8, 1 / 8, 1 / 8, 1 / 8])
    close((weights * -of_both)[:2].sum(), given["sft"] / 2)


def test_the_gate_of_hpt_leaves_each_group_what_it_learns_from() -> None:
    gate = load_method("selection", "success_gate", "algorithm.selections")
    nan = float("nan")
    # Three rows each, the last one a demonstration: none right; one right; not scored; no demonstration.
    scores = torch.tensor([0.0, 0.5, 1.0, 1.0, 0.0, 1.0, nan, 0.0, 1.0, 0.0, 0.0, 0.0])
    group = torch.arange(4).repeat_interleave(3)
    row = torch.tensor([0, 1, 2, 3, 4, 5, 7, 8, 9, 10, 11])
    provenance = provenance_of(row, torch.tensor([r in (2, 5, 8) for r in row.tolist()]))
    t = Trajectories(scores=scores, group=group, row=row, behaviour_logprobs=row * 0.0, provenance=provenance)
    credit = Credit(torch.zeros(len(row)))
    gone = gate(t, credit, AlgorithmConfig(policy_loss="hpt"))
    assert row[gone].tolist() == [0, 1, 5, 7]
    half = gate(t, credit, made(policy_loss="hpt", success_gate={"gate": 0.5}))
    assert row[half].tolist() == [0, 1, 3, 4, 7], "half of them is not above the gate"


def test_srft() -> None:
    given, weights = VECTORS["srft"], VECTORS["srft_weights"]
    right, wrong = tokens((0.0, 0.0), scores=torch.ones(4)), tokens((0.0, 0.0), scores=torch.zeros(4))
    loss, _ = loss_of("srft", replaced_logprobs(right))
    assert loss.supervised_weight is not None
    close(loss.supervised_weight[0], weights["sft"][0])
    close(loss.token_loss[:2].mean(), given["sft_term"])
    close(loss.token_loss[2], given["self_rl_pos_token"])
    close(loss_of("srft", replaced_logprobs(wrong))[0].token_loss[2], given["self_rl_neg_token"])
    close(weights["on_pos"], 0.1 * torch.tensor(weights["H"]).exp())
    off_policy = loss_of("srft", tokens((0.5, 0.0)))[0].token_loss - loss_of("srft", tokens((0.0, 0.0)))[0].token_loss
    close(off_policy[:2], -0.5 * LOGPROBS[:2].exp())


def replaced_logprobs(of: PolicyTokens) -> PolicyTokens:
    """With the published log-prob of a sampled token."""
    return PolicyTokens(**{**vars(of), "logprobs": torch.tensor([-0.2, -1.6, -0.65, -0.65])})


# --- house rules -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HYBRIDS)
def test_nothing_of_a_behaviour_policy_reaches_inserted_tokens(name: str) -> None:
    """Whatever their behaviour and proximal log-probs are, losses, gradients, weights and masks are the same."""
    correction = CorrectionConfig(
        kind="sequence_tis", masks=(MaskConfig(kind="veto"), MaskConfig(kind="geometric"), MaskConfig(kind="opsm"))
    )
    hint = {"row": torch.zeros(4, dtype=torch.long)}  # one trajectory: its ratio is of its sampled tokens
    found = []
    for noise in (0.0, -7.0):
        other = {
            name: torch.where(INSERTED, noise, getattr(tokens(), name))
            for name in ("behaviour_logprobs", "proximal_logprobs")
        }
        these = tokens((0.5, -0.5), **hint, **other, logprobs=LOGPROBS.clone().requires_grad_())
        loss, _ = loss_of(name, these)
        corrected = correct(these, correction)
        assert corrected.weights[INSERTED].tolist() == [1, 1]
        assert not (corrected.masked | corrected.truncated)[INSERTED].any()
        assert not any(indicator[INSERTED].any() for indicator in loss.indicators.values())
        found.append((loss.token_loss.detach(), gradient(name, these), corrected.weights))
    for before, after in zip(*found, strict=True):
        assert torch.equal(before, after)


@pytest.mark.parametrize("name", HYBRIDS)
def test_gradients_are_those_of_the_formula(name: str) -> None:
    """Against finite differences, but for weights that a formula detaches, which are taken from the report."""
    these = tokens((0.5, -0.5), logprobs=LOGPROBS.double().requires_grad_(), version=100)
    found = gradient(name, these)
    loss, _ = loss_of(name, these)
    assert loss.supervised_weight is not None
    assert not loss.supervised_weight.requires_grad
    imitation = -loss.supervised_weight[INSERTED]
    off_policy = -0.5 * LOGPROBS[INSERTED].exp() if name == "srft" else 0.0
    close(found[INSERTED].float(), (imitation + off_policy).float())


def test_denominators() -> None:
    """Of hybrids with parts apart: those of the method for what was sampled, and a mean for what was not."""
    row, inserted = torch.tensor([0, 0, 0, 1, 2, 2]), torch.tensor([1, 1, 1, 1, 0, 0]).bool()
    apart = AlgorithmConfig(policy_loss="chord_mu", loss_agg_mode="seq-mean-token-sum")
    weights = update_weights(row, row * 0, inserted, apart, max_response_length=9)
    close(weights.loss, [1 / 4, 1 / 4, 1 / 4, 1 / 4, 1, 1])
    close(weights.entropy, [0, 0, 0, 0, 1 / 2, 1 / 2])
    together = AlgorithmConfig(policy_loss="luffy", loss_agg_mode="seq-mean-token-sum")
    weights = update_weights(row, row * 0, inserted, together, max_response_length=9)
    close(weights.loss, [1 / 3] * 6)
    close(weights.entropy, [0, 0, 0, 0, 1 / 2, 1 / 2])
    plain = update_weights(row, row * 0, inserted & False, apart, max_response_length=9)
    assert torch.equal(plain.loss, token_weights(row, "seq-mean-token-sum", max_response_length=9))
    with pytest.raises(ValueError, match="needs the selection success_gate"):
        AlgorithmConfig(policy_loss="hpt", selections=("m2po",))
    with pytest.raises(ValueError, match=r"not trained on tokens that algorithm\.demonstrations inserts"):
        AlgorithmConfig(policy_loss="uft", adv_estimator="gae")
    with pytest.raises(ValueError, match=r"algorithm\.policy_loss ppo does not learn from"):
        made(policy_loss="ppo", demonstrations={"rows": 1})
