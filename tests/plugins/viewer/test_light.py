"""The viewer starts fast: neither of its commands imports torch."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["inspect.__main__", "inspect.server", "report.write"])
def test_no_torch_is_imported(module: str) -> None:
    heavy = "{'torch', 'transformers'} & set(sys.modules)"
    code = f"import sys, asyncrl_plugins.viewer.{module}; sys.exit(bool({heavy}))"
    subprocess.run([sys.executable, "-c", code], check=True)
