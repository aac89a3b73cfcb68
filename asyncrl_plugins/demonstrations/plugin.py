"""Rows of the hook that gives demonstrations, and of the losses that learn from them: an entry of the entry point group
`asyncrl.methods`. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.config.installed_methods import method_of
from asyncrl.config.method import Method, MethodSet
from asyncrl_plugins.demonstrations.settings import (
    ChordConfig,
    ChordPhiConfig,
    DemonstrationConfig,
    HptConfig,
    LuffyConfig,
    SrftConfig,
    SuccessGateConfig,
    UftConfig,
)

if TYPE_CHECKING:
    from asyncrl.config.schema import RunConfig

ONE_ROW = {"demonstrations": {"rows": 1}}


def problems(config: RunConfig) -> Iterator[str]:
    """Name what does not go with demonstrations, each with its fix."""
    algorithm, settings = config.algorithm, config.algorithm.settings_of(DemonstrationConfig)
    if not settings.rows and not settings.hints.parts:
        yield (
            "algorithm.demonstrations.rows and algorithm.demonstrations.hints.parts are 0: groups have neither "
            "demonstrations nor hints. Set rows=1, or parts=5 for policy_loss uft"
        )
    loss, left = method_of("policy_loss", algorithm.policy_loss), config.sampled_per_group
    least = 1 if loss and loss.credits_inserted else 2
    if settings.rows and left < least:
        yield (
            f"batch.group_size is {config.batch.group_size} and algorithm.demonstrations.rows is {settings.rows}, "
            f"which leaves {left} completions to sample: {algorithm.policy_loss} needs at least {least}. Raise the "
            "former or lower the latter"
        )
    if settings.rows and "zero_variance" in algorithm.filters:
        yield (
            "algorithm.filters has zero_variance, which would drop the groups that have the most to learn from "
            "their demonstration: those without a right completion. Set algorithm.filters=[], or "
            "algorithm.demonstrations.rows=0"
        )
    if config.environment.is_used:
        yield "algorithm.demonstrations: a demonstration has one turn, and an environment asks for more. Leave it out"


def hint_notes(config: RunConfig, total_steps: int) -> Iterator[str]:
    hints = config.algorithm.settings_of(DemonstrationConfig).hints
    if hints.parts and hints.steps >= total_steps:
        yield (
            f"algorithm.demonstrations.hints.steps is {hints.steps} and the run has {total_steps} steps: completions "
            "have hints to the end, each part with probability "
            f"{hints.probability(total_steps - 1):.2g} in the last one"
        )


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
        needs={"inserted"},
        settings=ChordConfig,
        defaults=ONE_ROW,
        notes=chord_notes,
    ),
    "chord_phi": Method(
        "asyncrl_plugins.demonstrations.losses:chord_phi",
        formula="chord_mu with w = p (1 - p) and a constant mu",
        paper="2508.11408",
        needs={"inserted"},
        settings=ChordPhiConfig,
        defaults=ONE_ROW,
        notes=chord_notes,
    ),
    "luffy": Method(
        "asyncrl_plugins.demonstrations.losses:luffy",
        formula="-A r, for demonstrations -A p / (p + gamma)",
        paper="2504.14945",
        needs={"inserted"},
        settings=LuffyConfig,
        credits_inserted=True,
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
        needs={"inserted"},
        settings=UftConfig,
        defaults={"demonstrations": {"hints": {"parts": 5}}},
    ),
    "hpt": Method(
        "asyncrl_plugins.demonstrations.losses:hpt",
        formula="ppo, or coef (-log p of the demonstration) for groups with no more than the gate's share of right "
        "rows",
        paper="2509.04419",
        needs={"inserted"},
        settings=HptConfig,
        shares_denominator=True,
        defaults={**ONE_ROW, "selections": ["success_gate"], "loss_agg_mode": "prompt-mean"},
    ),
    "srft": Method(
        "asyncrl_plugins.demonstrations.losses:srft",
        formula="c_s exp(-H) (-log p) - A p for demonstrations; -c_r exp(H) log p where right, else +log p",
        paper="2506.19767",
        needs={"inserted"},
        settings=SrftConfig,
        credits_inserted=True,
        defaults={**ONE_ROW, "proximal": "target"},
    ),
}
SELECTIONS = {
    "success_gate": Method(
        "asyncrl_plugins.demonstrations.losses:success_gate",
        formula="demonstrations of groups whose share of right rows is above the gate, sampled rows of the others",
        paper="2509.04419",
        needs={"inserted"},
        takes_from="batch",
        settings=SuccessGateConfig,
        plain_scores=True,
    ),
}
TICKET_HOOKS = {
    "demonstrations": Method(
        "asyncrl_plugins.demonstrations.tickets:Demonstrations",
        formula="`rows` completions of a group are its row's demonstration, or completions begin with j of its L "
        "parts, j ~ Binomial(L, p)",
        needs={"target"},
        settings=DemonstrationConfig,
        problems=problems,
        notes=hint_notes,
        inserts=lambda settings: settings.rows,
    )
}
METHODS = MethodSet(
    policy_losses=POLICY_LOSSES,
    selections=SELECTIONS,
    ticket_hooks=TICKET_HOOKS,
    overlays=Path(__file__).parent / "overlays",
)
