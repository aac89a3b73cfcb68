"""A learner step with each correction: independent of micro-batching, masked tokens silent, bad numbers named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from asyncrl.config.schema import RunConfig
from asyncrl.models.processing import PromptProcessor
from asyncrl.telemetry.metrics import MetricSet
from learner.reporting.metrics import GAUGE_OF_RECORD, GAUGE_OF_STALENESS_RECORD, METRICS, QUANTILE_OF_RECORD
from learner.training.engines.base import TokenOutputs
from learner.training.engines.torch_engine import TorchEngine
from learner.training.packing import MicroBatch, plan_micro_batches
from learner.training.step import LearnerStep, NotFiniteError
from tests.rigs.made_up_batch import KeepGradients, made_up_batch

pytestmark = pytest.mark.usefixtures("one_thread")
KINDS = ("none", "token_tis", "sequence_tis", "geometric_tis", "token_mis", "sequence_mis", "geometric_mis", "icepop")
MASKS = ("sequence", "geometric", "veto", "dppo_tv", "m2po", "opsm")
SETTINGS: dict[str, dict[str, Any]] = {
    **{kind: {"correction": {"kind": kind}} for kind in KINDS},
    **{mask: {"correction": {"kind": "none", "masks": [{"kind": mask}]}} for mask in MASKS},
    "all masks": {"correction": {"kind": "token_tis", "masks": [{"kind": mask} for mask in MASKS]}},
    "loglinear": {"proximal": "loglinear"},
    "linear": {"proximal": "linear"},
    "behaviour": {"proximal": "behaviour", "correction": {"kind": "none"}},
    "target": {"proximal": "target"},
    "dppo": {"policy_loss": "dppo", "correction": {"kind": "none"}},
}
WIDE: dict[str, dict[str, float]] = {
    "sequence_mis": {"lower": 0.3, "upper": 3.0},
    "geometric_mis": {"lower": 0.85, "upper": 1.15},
    "sequence": {"lower": 0.3, "upper": 3.0},
    "geometric": {"lower": 0.85, "upper": 1.15},
    "veto": {"lower": 0.6},
    "opsm": {"threshold": 0.05},
    "dppo_tv": {"lower": 1e-4, "upper": 1e-4},
}
"""Bounds that keep some of the made-up tokens and drop others."""


def widened(algorithm: dict[str, Any]) -> dict[str, Any]:
    correction = algorithm.get("correction", {})
    masks = [mask | WIDE.get(mask["kind"], {}) for mask in correction.get("masks", ())]
    return algorithm | {"correction": correction | WIDE.get(correction.get("kind", ""), {}) | {"masks": masks}}


def one_step(
    config: RunConfig, engine: KeepGradients | None = None
) -> tuple[dict[str, float], dict[str, torch.Tensor], int]:
    """Metrics, gradients and the number of micro-batches of a step at version 3."""
    processor = PromptProcessor(config.model)
    batch = made_up_batch(config, processor)
    engine = engine or KeepGradients(config, config.learner.optim, 1)
    engine.prepare()
    metrics = LearnerStep(engine, config)(batch, 3)
    return metrics, engine.gradients, len(plan_micro_batches(batch.train_groups, config.batch.tokens_per_microbatch))


@pytest.mark.parametrize("name", SETTINGS)
def test_micro_batching_changes_nothing(make_config: Callable[..., RunConfig], name: str) -> None:
    results = []
    for budget in (72, 4096):
        config = make_config(
            data={"max_prompt_length": 64},
            batch={"tokens_per_microbatch": budget},
            algorithm=widened(SETTINGS[name]) | {"entropy_coeff": 0.01},
        )
        results.append(one_step(config))
    (many_metrics, many, parts), (metrics, one, single) = results
    assert parts >= 4 > single == 1
    assert many_metrics.keys() == metrics.keys()
    assert many_metrics["loss"] == pytest.approx(metrics["loss"], rel=1e-5, abs=1e-8)
    assert many_metrics["mask_fraction"] == metrics["mask_fraction"]
    if name in MASKS or name.endswith("mis") or name == "icepop":
        assert 0 < metrics["mask_fraction"] < 1, "the bounds of this test should split the tokens"
    norm = torch.stack([g.norm() for g in one.values()]).norm()
    assert norm > 0
    difference = torch.stack([(many[n] - g).norm() for n, g in one.items()]).norm()
    assert difference / norm < 1e-5


def test_a_step_reports_by_staleness(make_config: Callable[..., RunConfig]) -> None:
    metrics, _, _ = one_step(make_config())
    buckets = {key.partition("/")[0] for key in metrics if key.startswith("staleness_")}
    assert buckets == {"staleness_1", "staleness_2", "staleness_3"}  # made up at versions 0 to 2, trained at 3
    for name in ("ess", "mismatch_kl_k3", "ratio/p99", "clip_fraction", "mask_fraction", "truncation_fraction"):
        assert {name, f"staleness_2/{name}"} <= metrics.keys()


class _KeepTokenGradients(KeepGradients):
    """Keeps the gradient that reaches each token's log-prob."""

    def forward(self, micro_batch: MicroBatch, *, entropy_gradient: bool = False) -> TokenOutputs:
        outputs = super().forward(micro_batch, entropy_gradient=entropy_gradient)
        if outputs.logprobs.requires_grad:
            outputs.logprobs.retain_grad()
            self.logprobs = outputs.logprobs
        return outputs


def test_masked_tokens_give_no_gradient_and_keep_their_place_in_the_denominator(
    make_config: Callable[..., RunConfig],
) -> None:
    gradients = []
    for correction in ({"kind": "none"}, {"kind": "none", "masks": [{"kind": "veto", "lower": 0.6}]}):
        config = make_config(batch={"tokens_per_microbatch": 4096}, algorithm={"correction": correction})
        engine = _KeepTokenGradients(config, config.learner.optim, 1)
        metrics, _, _ = one_step(config, engine)
        assert engine.logprobs.grad is not None
        gradients.append(engine.logprobs.grad)
    plain, vetoed = gradients
    gone = (vetoed == 0) & (plain != 0)
    assert 0 < int(gone.sum()) < len(plain)
    torch.testing.assert_close(vetoed[~gone], plain[~gone], rtol=0, atol=0)
    assert float((vetoed == 0).float().mean()) >= metrics["mask_fraction"] > 0


@pytest.mark.parametrize(
    ("proximal", "updates", "mask", "passes"),
    [
        ("recompute", 1, (), 0),
        ("recompute", 2, (), 1),
        ("recompute", 1, ({"kind": "m2po"},), 1),
        ("loglinear", 2, (), 0),
        ("linear", 2, (), 0),
        ("target", 2, (), 0),
    ],
)
def test_only_recomputing_costs_a_forward_pass(
    make_config: Callable[..., RunConfig], proximal: str, updates: int, mask: Any, passes: int
) -> None:
    config = make_config(
        batch={"tokens_per_microbatch": 4096},
        algorithm={"updates_per_batch": updates, "proximal": proximal, "correction": {"masks": mask}},
    )
    calls = []

    class Counting(KeepGradients):
        def forward(self, micro_batch: MicroBatch, *, entropy_gradient: bool = False) -> TokenOutputs:
            calls.append(torch.is_grad_enabled())
            return super().forward(micro_batch, entropy_gradient=entropy_gradient)

    one_step(config, Counting(config, config.learner.optim, 1))
    assert calls.count(False) == passes
    assert calls.count(True) == updates


# --- numbers that are not finite ----------------------------------------------------------------------


class _BadLogprob(TorchEngine):
    """The log-prob of the first token of the second micro-batch is not a number."""

    calls = 0

    def forward(self, micro_batch: MicroBatch, *, entropy_gradient: bool = False) -> TokenOutputs:
        outputs = super().forward(micro_batch, entropy_gradient=entropy_gradient)
        self.calls += 1
        if self.calls == 2:
            outputs.logprobs[0] = float("nan")
        return outputs


class _BadGradient(TorchEngine):
    """Micro-batches that hold row 9 have a finite loss and an infinite gradient."""

    def forward(self, micro_batch: MicroBatch, *, entropy_gradient: bool = False) -> TokenOutputs:
        outputs = super().forward(micro_batch, entropy_gradient=entropy_gradient)
        if bool((micro_batch.row == 9).any()) and outputs.logprobs.requires_grad:
            outputs.logprobs.register_hook(lambda gradient: gradient / 0.0)
        return outputs


def stopped(config: RunConfig, engine: TorchEngine, number: str) -> str:
    """The reason with which the step stops over this number, having checked that the weights did not move."""
    engine.prepare()
    before = {name: p.detach().clone() for name, p in engine.model.named_parameters()}
    batch = made_up_batch(config, PromptProcessor(config.model))
    with pytest.raises(NotFiniteError) as stop:
        LearnerStep(engine, config)(batch, 6)
    assert stop.value.number == number
    assert all(torch.equal(before[name], p) for name, p in engine.model.named_parameters())
    return str(stop.value)


def test_a_loss_that_is_no_number_stops_the_run_and_names_the_rows(make_config: Callable[..., RunConfig]) -> None:
    config = make_config(data={"max_prompt_length": 64}, batch={"tokens_per_microbatch": 72})
    reason = stopped(config, _BadLogprob(config, config.learner.optim, 1), "loss")
    assert "step 7 (policy version 6), update 1 of 1, micro-batch 2: the loss is nan" in reason
    assert "the learner's log-prob is not finite at 1 of" in reason
    assert "(completion " in reason
    assert "rl.parquet:" in reason


def test_an_infinite_gradient_stops_the_run_and_names_the_rows(make_config: Callable[..., RunConfig]) -> None:
    config = make_config(data={"max_prompt_length": 64}, batch={"tokens_per_microbatch": 72})
    reason = stopped(config, _BadGradient(config, config.learner.optim, 1), "grad_norm")
    assert "step 7 (policy version 6), update 1 of 1: the gradient norm is nan" in reason
    assert "It comes from micro-batch " in reason
    assert "(completion 1)" in reason  # row 9 is completion 1 of group 2
    assert "shows in " in reason
    assert "more parameters" in reason


# --- gauges ---------------------------------------------------------------------------------------------


def test_every_diagnostic_has_its_gauge(make_config: Callable[..., RunConfig]) -> None:
    metrics, _, _ = one_step(make_config())
    gauges = MetricSet(METRICS, "learner")
    for name in ("ess", "mismatch_kl_k1", "mismatch_kl_k3", "mask_fraction", "truncation_fraction", "clip_fraction"):
        assert name in metrics
        gauges[GAUGE_OF_RECORD[name]].set(metrics[name])
    for name, gauge in GAUGE_OF_STALENESS_RECORD.items():
        gauges[gauge].labels(staleness="2").set(metrics[f"staleness_2/{name}"])
    for name, quantile in QUANTILE_OF_RECORD.items():
        gauges["ratio"].labels(quantile=quantile).set(metrics[name])


def test_a_batch_without_trained_tokens_makes_no_step(make_config: Callable[..., RunConfig]) -> None:
    config = make_config(algorithm={"correction": {"masks": [{"kind": "m2po"}]}})
    batch = replace(made_up_batch(config, PromptProcessor(config.model)), train_groups=())
    engine = KeepGradients(config, config.learner.optim, 1)
    engine.prepare()
    assert LearnerStep(engine, config)(batch, 3) == {}
