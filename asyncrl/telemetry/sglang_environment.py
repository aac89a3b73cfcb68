"""SGLang's own environment: which Python it is, and what is installed there. Nothing of SGLang is imported."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from asyncrl.config.service_sections import RolloutConfig

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


def python_of(rollout: RolloutConfig) -> Path:
    """Python of SGLang's environment: rollout.sglang_python, or that of `.venv-sglang` beside this one's."""
    return Path(rollout.sglang_python or Path(sys.prefix).parent / ".venv-sglang" / "bin" / "python").absolute()


@cache
def look_into(python: Path) -> SGLangEnvironment | None:
    """Installed packages of a Python; None if it cannot be run."""
    try:
        done = subprocess.run([python, "-I", "-c", _LOOK], capture_output=True, text=True, timeout=LOOK_S, check=True)
        versions, has_stand_in = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return SGLangEnvironment(versions, has_stand_in)
