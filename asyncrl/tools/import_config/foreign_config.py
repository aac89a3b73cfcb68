"""Reads another framework's configuration: a YAML file, or the shell script that starts a run with `key=value`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from asyncrl.config import yaml_text
from asyncrl.config.schema import RunConfig
from asyncrl.config.suggest import file_hint
from asyncrl.errors import UserError
from asyncrl.tools.import_config.verl_keys import with_known_names

Framework = Literal["RLLaVA", "EasyR1", "verl", "TRL"]

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_OVERRIDE = re.compile(r"\+{0,2}([A-Za-z_]\w*(?:\.\w+)+)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::-([^}]*))?\}|(\w+))")
_MODULE = re.compile(r"(rllava|verl)\.")
_WORKER = "worker."
"""EasyR1 keeps actor, rollout, reference and reward below it; RLLaVA does not."""
_SHARED = {"data", "algorithm", "critic", "rollout", "reward", "trainer"}
"""Sections that both RLLaVA and we have."""
_OF_TRL = {
    "model_name_or_path",
    "num_generations",
    "max_completion_length",
    "reward_funcs",
    "per_device_train_batch_size",
}
"""Keys by which a configuration of `trl grpo` is known."""


@dataclass
class ForeignConfig:
    """Foreign settings under dotted names, without EasyR1's `worker.`."""

    framework: Framework
    values: dict[str, Any]
    launcher: dict[str, str] = field(default_factory=dict)
    """Flags of torchrun and the like, which are no keys."""
    sources: list[str] = field(default_factory=list)
    """The files that were read."""
    spellings: Mapping[str, str] = field(default_factory=dict)
    """How verl spells keys that have another name here."""

    def spelled(self, key: str) -> str:
        """The key as their own files write it."""
        below = self.framework == "EasyR1" and key.split(".")[0] in ("actor", "rollout", "ref", "reward", "critic")
        return self.spellings.get(key, _WORKER + key if below else key)


def read_foreign_config(path: Path) -> ForeignConfig:
    """Reads a YAML file, or a shell script with the YAML file that it names. UserError where it is neither."""
    if not path.is_file():
        raise UserError(f"there is no file {path}: {file_hint(path)}")
    if path.suffix not in (".sh", ".bash"):
        return _of_framework(_read_yaml(path), "", {}, [str(path)])
    module, before, after = _training_command(path)
    named = next((word.removeprefix("config=") for word in after if word.startswith("config=")), "")
    config = [_config_file(path, named)] if named else []
    values = _read_yaml(config[0]) if config else {}
    for key, text in (match.groups() for word in after if (match := _OVERRIDE.fullmatch(word))):
        values = {known: value for known, value in values.items() if not known.startswith(f"{key}.")}
        try:
            values[key], _ = yaml_text.parse(text, f"{path}: {key}")
        except UserError:  # a text that is no YAML
            values[key] = text
    flags = {name: value for name, _, value in (word.partition("=") for word in before) if name.startswith("--")}
    return _of_framework(values, module, flags, [str(file) for file in (path, *config)])


def _of_framework(values: dict[str, Any], module: str, flags: dict[str, str], sources: list[str]) -> ForeignConfig:
    sections = {key.split(".")[0] for key in values}
    if "actor_rollout_ref" in sections:
        known, spellings = with_known_names(values)
        return ForeignConfig("verl", known, flags, sources, spellings)
    if not module and sections <= RunConfig.model_fields.keys() and not sections <= _SHARED:
        raise UserError(f"{sources[0]} is an asyncrl configuration already: there is nothing to import")
    if "worker" in sections or module.startswith("verl."):
        framework: Framework = "EasyR1"
    elif sections & {"actor", "rollout"} or module.startswith("rllava."):
        framework = "RLLaVA"
    elif sections & _OF_TRL:
        framework = "TRL"
    else:
        raise UserError(
            f"{sources[0]} looks like neither RLLaVA's configuration (sections actor, rollout) nor EasyR1's (section "
            f"worker) nor TRL's (num_generations and the like): it has {', '.join(sorted(sections)) or 'nothing'}"
        )
    return ForeignConfig(framework, {key.removeprefix(_WORKER): value for key, value in values.items()}, flags, sources)


def _read_yaml(path: Path) -> dict[str, Any]:
    value, _ = yaml_text.parse(_text(path), str(path))
    if not isinstance(value, dict):
        raise UserError(f"{path} holds no configuration")
    return dict(_flat(value))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}. Name a YAML file, or a script that starts a training") from None


def _flat(value: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, inner in value.items():
        if isinstance(inner, dict) and inner:
            yield from _flat(inner, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", inner


def _training_command(path: Path) -> tuple[str, list[str], list[str]]:
    """Module, words before it and words after it of the script's command `-m rllava...` or `-m verl...`."""
    try:
        words = shlex.split(_text(path), comments=True)
    except ValueError as error:
        raise UserError(f"{path} is no shell script: {error}") from None
    place = next((number for number, word in enumerate(words) if _MODULE.match(word)), None)
    if place is None:
        raise UserError(
            f"{path} starts neither `-m rllava...` nor `-m verl...`. Name the YAML file that it uses instead"
        )
    variables: dict[str, str] = {}
    for match in filter(None, map(_ASSIGNMENT.fullmatch, words[:place])):
        variables[match[1]] = _expanded(match[2], variables)
    return words[place], words[:place], [_expanded(word, variables) for word in words[place + 1 :]]


def _expanded(text: str, variables: dict[str, str]) -> str:
    """Replaces the script's own variables; others stay as they are written."""
    return _VARIABLE.sub(lambda match: variables.get(match[1] or match[3], match[2] or match[0]), text)


def _config_file(script: Path, name: str) -> Path:
    """Scripts name it from the root of their repository: here, or one of the script's folders."""
    for folder in (Path(), *script.absolute().parents):
        if (folder / name).is_file():
            return folder / name
    raise UserError(f"{script} uses {name}, which is neither here nor beside the script. Run this in their repository")
