"""Rows of the losses that learn from demonstrations: an entry of the entry point group `asyncrl.methods`. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.config.method import Method, MethodSet
from asyncrl_plugins.demonstrations.settings import (
    ChordConfig,
    ChordPhiConfig,
    HptConfig,
    LuffyConfig,
    SrftConfig,
    SuccessGateConfig,
    UftConfig,
)

if TYPE_CHECKING:
    from asyncrl.config.schema import RunConfig

ONE_ROW = {"demonstrations": {"rows": 1}}


def chord_notes(config: RunConfig, total_steps: int) -> Iterator[str]:
    chord, where = config.algorithm.settings_of(ChordConfig), f"algorithm.{config.algorithm.policy_loss}"
    if chord.warmup_steps + chord.decay_steps >= total_steps:
        yield (
            f"{where}.warmup_steps ({chord.warmup_steps}) and decay_steps ({chord.decay_steps}) are "
            f"{chord.warmup_steps + chord.decay_steps} steps and the run has {total_steps} steps: mu, the weight of "
            f"the demonstrations, is {chord.mu(total_steps - 1):.2g} in the last one, its peak {chord.peak:g}, its "
            f"valley {chord.valley:g}"
        )


POLICY_LOSSES = {
    "chord_mu": Method(
        "asyncrl_plugins.demonstrations.losses:chord_mu",
        formula="(1 - mu) ppo + mu mean(-w log p over demonstrations), mu by the step, w = 1",
        paper="2508.11408",
        needs={"demonstrations"},
        settings=ChordConfig,
        defaults=ONE_ROW,
        notes=chord_notes,
    ),
    "chord_phi": Method(
        "asyncrl_plugins.demonstrations.losses:chord_phi",
        formula="chord_mu with w = p (1 - p) and a constant mu",
        paper="2508.11408",
        needs={"demonstrations"},
        settings=ChordPhiConfig,
        defaults=ONE_ROW,
        notes=chord_notes,
    ),
    "luffy": Method(
        "asyncrl_plugins.demonstrations.losses:luffy",
        formula="-A r, for demonstrations -A p / (p + gamma)",
        paper="2504.14945",
        needs={"demonstrations"},
        settings=LuffyConfig,
        credits_demonstrations=True,
        shares_denominator=True,
        defaults={
            **ONE_ROW,
            "norm_adv_by_std": False,
            "loss_agg_mode": "seq-mean-token-sum-norm",
            "entropy_coeff": 0.01,
        },
    ),
    "uft": Method(
        "asyncrl_plugins.demonstrations.losses:uft",
        formula="ppo + coef mean(-log p over hints)",
        paper="2505.16984",
        needs={"demonstrations"},
        settings=UftConfig,
        defaults={"demonstrations": {"hints": {"segments": 5}}},
    ),
    "hpt": Method(
        "asyncrl_plugins.demonstrations.losses:hpt",
        formula="ppo, or coef (-log p of the demonstration) for groups with no more than the gate's share of right "
        "rows",
        paper="2509.04419",
        needs={"demonstrations"},
        settings=HptConfig,
        shares_denominator=True,
        defaults={**ONE_ROW, "selections": ["success_gate"], "loss_agg_mode": "prompt-mean"},
    ),
    "srft": Method(
        "asyncrl_plugins.demonstrations.losses:srft",
        formula="c_s exp(-H) (-log p) - A p for demonstrations; -c_r exp(H) log p where right, else +log p",
        paper="2506.19767",
        needs={"demonstrations"},
        settings=SrftConfig,
        credits_demonstrations=True,
        defaults={**ONE_ROW, "proximal": "target"},
    ),
}
SELECTIONS = {
    "success_gate": Method(
        "asyncrl_plugins.demonstrations.losses:success_gate",
        formula="demonstrations of groups whose share of right rows is above the gate, sampled rows of the others",
        paper="2509.04419",
        needs={"demonstrations"},
        takes_from="batch",
        settings=SuccessGateConfig,
        plain_scores=True,
    ),
}
METHODS = MethodSet(policy_losses=POLICY_LOSSES, selections=SELECTIONS, overlays=Path(__file__).parent / "overlays")
