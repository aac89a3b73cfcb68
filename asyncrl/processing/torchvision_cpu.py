"""Lets the registry's torchvision be imported beside a CPU-only torch.

The PyPI wheel of torchvision is linked against CUDA; with CPU-only torch its compiled operators cannot be
loaded and the import fails because two operator schemas are missing. Image processors need only the pure
Python part, so declaring the two schemas is enough. Nothing happens where torch has CUDA or ROCm.
"""

from __future__ import annotations

import importlib.abc
import sys
from importlib.machinery import ModuleSpec
from typing import Any

_MISSING_OPERATORS = ("nms", "qnms")
_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_libraries: list[Any] = []  # schemas live as long as their library object


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            _declare_missing_operators()
        return None  # the ordinary import goes on


def _declare_missing_operators() -> None:
    import torch

    if torch.version.cuda is not None or torch.version.hip is not None:
        return
    from importlib.metadata import PackageNotFoundError, version

    try:
        if version("torchvision").endswith("+cpu"):
            return  # this build brings its operators
    except PackageNotFoundError:
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for operator in _MISSING_OPERATORS:
        # A copy of this file may have done it already: looking for torchvision, as `datasets` does, is enough for that.
        if not hasattr(torch.ops.torchvision, operator):
            library.define(operator + _SCHEMA)
    _libraries.append(library)


def install() -> None:
    """Arrange it for the first import of torchvision; costs nothing until then."""
    # By name: a copy of this file may have been installed for the whole environment (scripts/install.sh).
    waiting = any(type(finder).__name__ == _BeforeTorchvision.__name__ for finder in sys.meta_path)
    if "torchvision" not in sys.modules and not waiting:
        sys.meta_path.insert(0, _BeforeTorchvision())


install()
