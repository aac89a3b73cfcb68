"""Sources of a run: its data files with their hashes, and the licence that the base model's folder names."""

from __future__ import annotations

import glob
import hashlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from asyncrl.config.sections import ModelConfig
from asyncrl.model_files.folder import is_hub_name

_FRONT_MATTER = re.compile(r"\A---\s*\n(.*?)\n---\s*(\n|\Z)", re.DOTALL)
LICENCE_KEYS = ("license", "license_name", "license_link")
"""Keys of a card's front matter about a licence, as the hub has them."""
HASH_DIGITS = 16


def data_files(names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the last part of each data file's name and the beginning of its SHA-256; of a folder, of a data set of the
    hub and of a file that has gone, what it is. Contents stay here."""
    for name in names:
        path = Path(name)
        files = [path] if path.is_file() else sorted(map(Path, glob.glob(name)))
        for file in [file for file in files if file.is_file()]:
            with file.open("rb") as opened:
                yield file.name, hashlib.file_digest(opened, "sha256").hexdigest()[:HASH_DIGITS]
        if path.is_dir():
            yield path.name, "a folder"
        elif not files:
            yield (name, "of the hub") if hub_dataset(name) else (path.name, "no longer there")


def hub_dataset(name: str) -> str:
    """The data set `org/name` of the hub that a source names as `org/name@split`; empty for any other source."""
    repository = name.rpartition("@")[0]
    return repository if is_hub_name(repository) and not Path(repository).exists() else ""


def hub_model(config: ModelConfig) -> str:
    """The model `org/name` of the hub that `model.path` names; empty for a folder of this machine."""
    return config.path.partition("@")[0] if is_hub_name(config.path) and not Path(config.path).exists() else ""


def licence_of(config: ModelConfig) -> dict[str, str]:
    """Keys of LICENCE_KEYS that the card in the base model's folder names, or that in the hub's cache."""
    card = Path(config.path) / "README.md"
    if repository := hub_model(config):
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(repository, card.name, revision=config.path.partition("@")[2] or None)
        card = Path(found) if isinstance(found, str) else card
    front = _FRONT_MATTER.match(card.read_text(encoding="utf-8", errors="replace")) if card.is_file() else None
    try:
        said: Any = yaml.safe_load(front[1]) if front else {}
    except yaml.YAMLError:
        return {}
    return {key: str(said[key]) for key in LICENCE_KEYS if isinstance(said, dict) and said.get(key)}


def licence_texts(config: ModelConfig) -> list[str]:
    """Names of files in the base model's folder that hold the text of a licence."""
    folder = Path(config.path)
    return sorted(file.name for word in ("LICENSE", "LICENCE", "COPYING") for file in folder.glob(f"{word}*"))
