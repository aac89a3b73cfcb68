"""The page of all configuration keys."""

from __future__ import annotations

import pytest

from asyncrl.cli import main
from asyncrl.config.keys import all_keys
from asyncrl_plugins.reference.page import INTERNAL, REPEATED


def test_the_reference_has_every_key_with_its_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config-reference"]) == 0
    reference = capsys.readouterr().out
    for key in all_keys().values():
        assert f"`{key.path}`" in reference or key.path.startswith((*REPEATED, *INTERNAL))
        assert key.text, f"{key.path} has no docstring"
