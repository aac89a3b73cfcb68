"""The notebook of examples/, cell by cell, for two steps."""

from __future__ import annotations

import os
from pathlib import Path

import nbformat
import psutil
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "quickstart.ipynb"

pytestmark = pytest.mark.slow


def test_the_notebook_runs_shows_its_panel_and_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"STEPS": "2", "PYTHONPATH": str(ROOT), "IPYTHONDIR": str(tmp_path / "ipython")}.items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    before = {child.pid for child in psutil.Process(os.getpid()).children(recursive=True)}
    NotebookClient(notebook, timeout=280, resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    panel = next(one["data"]["text/html"] for one in printed if "text/html" in one.get("data", {}))
    assert "Is it learning?" in panel
    assert any("finished, step 2, held-out accuracy" in one.get("data", {}).get("text/plain", "") for one in printed)
    assert (tmp_path / "runs" / "notebook-model" / "config.json").is_file()
    assert {child.pid for child in psutil.Process(os.getpid()).children(recursive=True)} <= before


def test_the_notebook_is_committed_without_outputs() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells)
