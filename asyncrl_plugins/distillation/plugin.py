"""Rows of the methods: an entry of the entry point group `asyncrl.methods`. No torch."""

from __future__ import annotations

import filecmp
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl.config.method import Method, MethodSet
from asyncrl_plugins.distillation.settings import DistillationConfig, GkdConfig, OpdConfig

if TYPE_CHECKING:
    from asyncrl.config.schema import RunConfig


def problems(config: RunConfig) -> Iterator[str]:
    """Name what leaves the student without a teacher, or with one of another language, with the fix."""
    teacher, chosen = config.reference.path, f"algorithm.adv_estimator is {config.algorithm.adv_estimator}"
    if not teacher or teacher == config.model.path:
        yield (
            f"{chosen}, and reference.path is {teacher!r}: the student would be its own teacher. Set "
            "reference.path to the teacher's folder"
        )
    if config.reference.moves:
        yield (
            f"{chosen}, and the reference moves: the student would become its own teacher. Leave "
            "reference.reset_every_steps and reference.ema out"
        )
    if config.algorithm.kl_estimator == "full":
        yield (
            f"{chosen}, which reads the teacher's log-probs, and algorithm.kl_estimator is full, which compares whole "
            "distributions. Set algorithm.kl_estimator=k1, or leave it out"
        )
    files = [Path(folder) / "tokenizer.json" for folder in (config.model.path, teacher)]
    if teacher and all(file.is_file() for file in files) and not _same_ids(*files):
        yield (
            f"{chosen}, and the tokenizer of reference.path {teacher!r} has other ids than "
            f"that of model.path {config.model.path!r}. Choose a teacher with the student's tokenizer"
        )


def _same_ids(student: Path, teacher: Path) -> bool:
    """Whether two tokenizers have the same ids. Equal files, the usual case, are not parsed: a configuration is checked
    many times."""
    return filecmp.cmp(student, teacher, shallow=False) or _ids(student) == _ids(teacher)


def _ids(tokenizer: Path) -> tuple[Any, list[tuple[int, str]]]:
    told = json.loads(tokenizer.read_text(encoding="utf-8"))
    return told["model"].get("vocab"), sorted((token["id"], token["content"]) for token in told.get("added_tokens", ()))


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
            formula="teachers score each batch",
            settings=DistillationConfig,
        )
    },
    overlays=Path(__file__).parent / "overlays",
)
