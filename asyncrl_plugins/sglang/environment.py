"""SGLang's own environment: which Python it is, and what is installed there. Nothing of SGLang is imported."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from asyncrl_plugins.sglang.plugin import SGLangConfig

LOOK_S = 60.0
_LOOK = """
import importlib.metadata, importlib.util, json, pathlib
def version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
kernels = importlib.util.find_spec("sgl_kernel")
ours = kernels is not None and "IS_ASYNCRL_STAND_IN" in pathlib.Path(kernels.origin).read_text(errors="replace")
print(json.dumps([{name: version(name) for name in ("sglang", "torch", "transformers")}, ours]))
"""


@dataclass(frozen=True)
class SGLangEnvironment:
    versions: dict[str, str]
    """Installed versions of sglang, torch and transformers; empty texts where there is none."""
    has_stand_in: bool
    """True if its kernels are ours, which compute in torch."""


def python_of(settings: SGLangConfig) -> Path:
    """Python of SGLang's environment: rollout.sglang.python, or that of `.venv-sglang` beside this one's."""
    return Path(settings.python or Path(sys.prefix).parent / ".venv-sglang" / "bin" / "python").absolute()


@cache
def look_into(python: Path) -> SGLangEnvironment | None:
    """Installed packages of a Python; None if it cannot be run."""
    try:
        done = subprocess.run(
            [python, "-I", "-c", _LOOK], capture_output=True, timeout=LOOK_S, check=True, encoding="utf-8"
        )
        versions, has_stand_in = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return SGLangEnvironment(versions, has_stand_in)


def installation() -> str:
    """Line for `asyncrl doctor`: SGLang's versions in its own environment, and the state of its proof."""
    python = python_of(SGLangConfig())
    found = look_into(python)
    if found is None or not found.versions["sglang"]:
        return f"not installed for {python} (make install-sglang)"
    versions = ", ".join(f"{name} {number}" for name, number in found.versions.items())
    kernels = "a stand-in for its kernels, which computes in torch" if found.has_stand_in else "its own kernels"
    return f"{versions}, with {kernels}; unproven on a GPU"
