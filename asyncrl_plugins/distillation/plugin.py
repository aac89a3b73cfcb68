"""Rows of the methods: an entry of the entry point group `asyncrl.methods`. No torch."""

from __future__ import annotations

from pathlib import Path

from asyncrl.config.method import Method, MethodSet
from asyncrl_plugins.distillation.rules import other_models, problems, section_problems
from asyncrl_plugins.distillation.settings import DistillationConfig, GkdConfig, OpdConfig

METHODS = MethodSet(
    advantages={
        "opd": Method(
            "asyncrl_plugins.distillation.advantages:opd",
            formula="teacher_weight (log teacher - log student) + reward_weight * grpo",
            paper="2306.13649",
            needs={"proximal", "reference"},
            settings=OpdConfig,
            problems=problems,
        ),
        "gkd": Method(
            "asyncrl_plugins.distillation.advantages:gkd",
            formula="reward_weight * grpo, beside the loss teacher_weight JSD_beta(teacher, student)",
            paper="2306.13649",
            needs={"reference"},
            settings=GkdConfig,
            defaults={"distillation": {}},
            problems=problems,
        ),
    },
    loss_hooks={
        "distillation": Method(
            "asyncrl_plugins.distillation.hook:Distillation",
            formula="log-probs of teachers for opd and gkd, by a column of the row, after a prompt with more in it",
            settings=DistillationConfig,
            problems=section_problems,
            models=other_models,
        )
    },
    ticket_hooks={
        "distillation": Method(
            "asyncrl_plugins.distillation.tickets:TeacherRows",
            formula="rows that no teacher can score are bad rows",
            settings=DistillationConfig,
        )
    },
    overlays=Path(__file__).parent / "overlays",
)
