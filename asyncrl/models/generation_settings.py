"""The sampling defaults that a model folder carries (generation_config.json), as transformers saves them again.

It reads files that it refuses to write: a run would train to its end, and then have no checkpoint and no export.
"""

from __future__ import annotations

import logging
import re
from typing import Any

from asyncrl.config.sections import ModelConfig
from asyncrl.errors import UserError
from asyncrl.model_files.folder import model_folder

logger = logging.getLogger(__name__)

_FLAG = re.compile(r"^- `(\w+)`:", re.MULTILINE)
"""A setting that transformers' refusal names."""


def generation_config(config: ModelConfig) -> Any:
    """The folder's GenerationConfig, as it can be saved with a trained model; None where the folder has none.

    What transformers would not save is changed, not in the file, and logged: a temperature or its like without
    `do_sample`, as older files have it, means sampling; other settings that have no effect are left out. Raises
    UserError where that is not enough.
    """
    from transformers import GenerationConfig

    folder = model_folder(config)
    if not (folder / "generation_config.json").is_file():
        return None
    try:
        generation = GenerationConfig.from_pretrained(folder)
    except (ValueError, TypeError, OSError) as problem:
        raise UserError(_refused(config, str(problem))) from problem
    if not (problem := _problem(generation)):
        return generation
    before = generation.to_dict()
    if "do_sample=True" in problem and generation.do_sample is None:
        generation.do_sample = True
    for name in _FLAG.findall(_problem(generation)):
        setattr(generation, name, None)
    if left := _problem(generation):
        raise UserError(_refused(config, left))
    changed = {name: value for name, value in generation.to_dict().items() if value != before.get(name)}
    logger.warning(
        "transformers does not save generation_config.json as it is in %s: exports have %s",
        config.path,
        ", ".join(f"{name}={value}" if value is not None else f"no {name}" for name, value in changed.items()),
    )
    return generation


def _problem(generation: Any) -> str:
    """The reason why transformers would not save it; empty where it would."""
    try:
        generation.validate(strict=True)
    except ValueError as problem:
        return str(problem)
    return ""


def _refused(config: ModelConfig, problem: str) -> str:
    return (
        f"generation_config.json in {config.path} cannot be used: {' '.join(problem.split())[:400]}. Correct it: a "
        "trained model could not be saved with it"
    )
