"""Plug-ins beside the core: none imports another, nothing unpickles, and a wheel may have any of them alone."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from scripts.core_tree import is_copied, with_plugin
from tests.rigs.tiny import ROOT
from tests.unit.asyncrl.test_cli_start import HEAVY, LIGHT, run_program
from tests.unit.asyncrl.test_layers import unpickling

PLUGINS = sorted(folder.parent.name for folder in (ROOT / "asyncrl_plugins").glob("*/__init__.py"))
NAMED = re.compile(r"\b(asyncrl_plugins|tests\.plugins)(?:\.| import )(\w+)|\btests(?:\.| import )(together)\b")
"""Modules of plug-ins, in imports and in strings such as `module:name`."""


@pytest.mark.parametrize("plugin", PLUGINS)
def test_a_plug_in_and_its_tests_name_no_other_plug_in(plugin: str) -> None:
    folders = (ROOT / "asyncrl_plugins" / plugin, ROOT / "tests" / "plugins" / plugin)
    files = [file for folder in folders for ending in ("py", "yaml") for file in folder.rglob(f"*.{ending}")]
    assert len(files) > 2
    wrong = [
        f"{file.relative_to(ROOT)} names {found[0]}"
        for file in files
        for found in NAMED.finditer(file.read_text())
        if found[2] != plugin
    ]
    assert not wrong, "\n".join(wrong) + "\nTests of two plug-ins are in tests/together"


def test_each_has_tests_of_its_own_and_a_page() -> None:
    assert [name for name in PLUGINS if not list((ROOT / "tests" / "plugins" / name).glob("test_*.py"))] == []
    assert [name for name in PLUGINS if not (ROOT / "asyncrl_plugins" / name / "README.md").is_file()] == []


def test_nothing_in_a_plug_in_is_unpickled() -> None:
    files = [path.relative_to(ROOT) for path in sorted((ROOT / "asyncrl_plugins").rglob("*.py"))]
    assert len(files) > 100
    assert not unpickling(files), "\n".join(unpickling(files))


def test_the_list_of_commands_imports_no_settings() -> None:
    """It takes a tenth of a second, and half of one with them."""
    output, imported = run_program("--help", packages=HEAVY | LIGHT)
    assert imported == "[]", output


# --- scripts/core_tree.py ------------------------------------------------------------------------------------


def entries(pyproject: str) -> set[str]:
    groups = tomllib.loads(pyproject)["project"].get("entry-points", {})
    return {value for entry in groups.values() for value in entry.values()}


def test_a_wheel_has_the_entry_points_of_its_plug_in_alone() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    alone = {name: entries(with_plugin(text, name)) for name in PLUGINS}
    for name, found in alone.items():
        assert found, f"{name} has no entry point"
        assert all(value.startswith(f"asyncrl_plugins.{name}.") for value in found), name
    assert set().union(*alone.values()) == entries(text)
    core = with_plugin(text, "")
    assert entries(core) == set()
    assert "asyncrl_plugins" not in str(tomllib.loads(core)["tool"]["setuptools"])


def test_a_tree_has_the_files_of_its_plug_in_alone() -> None:
    names = ["asyncrl/cli.py", "asyncrl_plugins/vllm/engine.py", "tests/plugins/trl/rooms.py", "tests/together/a.py"]
    assert [[Path(name).stem for name in names if is_copied(name, plugin)] for plugin in ("", "vllm", "trl")] == [
        ["cli"],
        ["cli", "engine"],
        ["cli", "rooms"],
    ]
