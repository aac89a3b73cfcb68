"""Rules of a configuration with teachers: what leaves the student without one, and what a teacher cannot read. No
torch."""

from __future__ import annotations

import filecmp
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl.config.installed_methods import chosen_hooks
from asyncrl.errors import UserError
from asyncrl.model_files.folder import read_config
from asyncrl_plugins.distillation.rows import DEFAULT
from asyncrl_plugins.distillation.settings import DistillationConfig

if TYPE_CHECKING:
    from asyncrl.config.schema import RunConfig

ESTIMATORS = ("opd", "gkd")
SECTION = "algorithm.distillation"


def settings_of(config: RunConfig) -> DistillationConfig:
    """Settings of the section, or defaults where it is not there."""
    given = (config.algorithm.model_extra or {}).get("distillation")
    return given if isinstance(given, DistillationConfig) else DistillationConfig()


def teacher_folders(config: RunConfig) -> dict[str, str]:
    """Folders of all teachers by the settings that name them."""
    named = {f"{SECTION}.teachers.{name}": folder for name, folder in settings_of(config).teachers.items()}
    return named or {"reference.path": config.reference.path}


def other_models(config: RunConfig) -> Mapping[str, str]:
    """Folders of teachers that are not the reference policy, each once, by the settings that name them."""
    reference = config.reference.path or config.model.path
    once = {folder: setting for setting, folder in reversed(teacher_folders(config).items()) if folder != reference}
    return {setting: folder for folder, setting in once.items() if folder}


def problems(config: RunConfig) -> Iterator[str]:
    """Name what leaves the student without a teacher, or with one of another language, with the fix."""
    settings, chosen = settings_of(config), f"algorithm.adv_estimator is {config.algorithm.adv_estimator}"
    folders, student = teacher_folders(config), config.model.path
    if {*folders.values()} <= {"", student} and not settings.privileged:
        yield (
            f"{chosen}, and reference.path is {config.reference.path!r}: the student would be its own teacher. Set "
            f"reference.path to the teacher's folder, or {SECTION}.privileged to what the teacher alone sees"
        )
    if config.reference.moves and not settings.privileged:
        yield (
            f"{chosen}, and the reference moves: the student would become its own teacher. Leave "
            "reference.reset_every_steps and reference.ema out"
        )
    if config.algorithm.kl_estimator == "full":
        yield (
            f"{chosen}, which reads the teacher's log-probs, and algorithm.kl_estimator is full, which compares whole "
            "distributions. Set algorithm.kl_estimator=k1, or leave it out"
        )
    for setting, folder in folders.items():
        files = [Path(each) / "tokenizer.json" for each in (student, folder)]
        if folder and all(file.is_file() for file in files) and not _same_ids(*files):
            yield (
                f"{chosen}, and the tokenizer of {setting} {folder!r} has other ids than that of model.path "
                f"{student!r}. Choose a teacher with the student's tokenizer"
            )


def section_problems(config: RunConfig) -> Iterator[str]:
    """Name what teachers of several rows, and privileged prompts, do not go with, each with its fix."""
    settings, algorithm = settings_of(config), config.algorithm
    if algorithm.adv_estimator not in ESTIMATORS:
        yield (
            f"{SECTION} is given, and algorithm.adv_estimator {algorithm.adv_estimator} asks no teacher. Choose "
            f"{' or '.join(ESTIMATORS)}, or leave {SECTION} out"
        )
    reference, teachers = config.reference.path or config.model.path, settings.teachers
    if teachers and reference not in teachers.values():
        name = DEFAULT if DEFAULT in teachers else next(iter(teachers))
        yield (
            f"{SECTION}.teachers names {', '.join(teachers.values())}, and reference.path is "
            f"{config.reference.path!r}: the reference policy would be loaded and teach no row. Set "
            f"reference.path={teachers[name]}"
        )
    traces = chosen_hooks("token_trace", algorithm)
    if settings.privileged and traces and config.reference_model is None:
        yield (
            f"{SECTION}.privileged is set, and algorithm.{next(iter(traces))} records the tokens of the student's "
            "prompt, which the model without adapters is to compute after another one. Leave one of them out, or set "
            "reference.path"
        )
    if settings.privileged:
        yield from _too_long(config, settings)


def _too_long(config: RunConfig, settings: DistillationConfig) -> Iterator[str]:
    """Name teachers that a privileged prompt with its completion may be too long for."""
    from asyncrl.checks.inputs import known_positions, rotary_changes

    data = config.data
    longest = data.max_prompt_length + settings.privileged_tokens + data.max_response_length
    for folder in {*teacher_folders(config).values()}:
        model = config.model.model_copy(update={"path": folder or config.model.path})
        try:
            described = read_config(model)
        except UserError:  # the folder's own check says why
            continue
        bounds = [until for _, until in rotary_changes(described)]
        bounds += [positions] if (positions := known_positions(described)) else []
        if bounds and longest > min(bounds):
            yield (
                f"a teacher may score {longest} tokens (data.max_prompt_length + {SECTION}.privileged_tokens + "
                f"data.max_response_length), and the model in {model.path} knows {min(bounds)} positions, or others "
                "beyond these. Lower one of the former"
            )


def _same_ids(student: Path, teacher: Path) -> bool:
    """Whether two tokenizers have the same ids. Equal files, the usual case, are not parsed: a configuration is checked
    many times."""
    return filecmp.cmp(student, teacher, shallow=False) or _ids(student) == _ids(teacher)


def _ids(tokenizer: Path) -> tuple[Any, list[tuple[int, str]]]:
    told = json.loads(tokenizer.read_text(encoding="utf-8"))
    return told["model"].get("vocab"), sorted((token["id"], token["content"]) for token in told.get("added_tokens", ()))
