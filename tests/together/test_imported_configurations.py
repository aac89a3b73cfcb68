"""Translated configurations name keys of the core and of other plug-ins: vLLM, methods, trackers."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from asyncrl.cli import main
from asyncrl.config.keys import all_keys
from asyncrl.config.load import load_config
from asyncrl.config.schema import RunConfig
from asyncrl_plugins.import_config.table import FRAMEWORKS, table_of
from tests.plugins.import_config.test_import_config import EXPORTED, FILES

OPEN = ("rollout.engine_args.", "environment.config.")
"""Arguments of the engine and settings of the environment, whose names the schema leaves open."""


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_translation_loads_with_what_it_lacks(framework: str, tmp_path: Path) -> None:
    out = tmp_path / "ours.yaml"
    assert main(["import-config", str(EXPORTED / FILES[framework]), "-o", str(out)]) == 2
    lacking = [
        "reward.functions=[{function: exact_match}]",
        "data.train_files=[rows.jsonl]",
        "run_dir=run",
        "rollout.engine=vllm",
    ]
    load_config(out, lacking)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_names_on_the_right_are_keys(framework: str) -> None:
    """Names of ours, and in notes the names that are neither ours nor theirs."""
    table = table_of(framework)
    known = all_keys().keys()
    rows = [row for rows in table.names.values() for row in rows]
    ours = {name for row in rows for name in row.possible_names()}
    assert {name for name in ours if not name.startswith(OPEN)} <= known

    sections = "|".join(RunConfig.model_fields)
    notes = [row.note for row in rows] + [note for _, note in table.as_here.values()]
    notes += [*table.left_out.values(), *table.not_translated.values(), table.about]
    left = [*table.names, *table.as_here, *table.left_out, *table.not_translated]
    theirs = {part for key in left for part in tails(key)}
    mentioned = {name for note in notes for name in re.findall(rf"\b(?:{sections})\.[a-z_0-9.]*[a-z_0-9]", note)}
    beginnings = {key[:end] for key in known for end in (at.start() for at in re.finditer(r"\.", key))}
    for name in mentioned - known - beginnings:
        assert name.startswith(OPEN) or any(fnmatchcase(name, pattern) for pattern in theirs), name


def tails(key: str) -> list[str]:
    """Endings of a key: notes leave out the beginning of a framework's keys."""
    parts = key.split(".")
    return [end for number in range(len(parts)) if (end := ".".join(parts[number:])) != "*"]
