"""Stand-in for CUDA graphs on a CPU: the operations of a step on its tensors, taken down once and computed again.

As a graph does, it has the addresses of all tensors and the numbers of the one time that Python ran, and it refuses
what looks at a value or makes a tensor of Python's numbers, for which a GPU would have to be waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

LOOKS = ("_local_scalar_dense", "item", "equal", "lift_fresh", "nonzero", "masked_select", "bincount", "_unique2")
"""Operations for which a GPU is waited for."""


def storages(values: Any) -> dict[int, torch.Tensor]:
    return {
        leaf.untyped_storage().data_ptr(): leaf
        for leaf in tree_leaves(values)
        if isinstance(leaf, torch.Tensor) and leaf.numel()
    }


class Recording(TorchDispatchMode):
    """Operations, with their arguments and what came out."""

    def __init__(self):
        super().__init__()
        self.operations: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name().partition(".")[0].removeprefix("aten::") in LOOKS:
            raise RuntimeError(f"operation not permitted when stream is capturing: {func.name()}")
        made = func(*args, **(kwargs or {}))
        is_view = not func._schema.is_mutable and storages(made).keys() & storages((args, kwargs)).keys()
        if not is_view:  # a view of the same memory shows what was written since
            self.operations.append((func, args, kwargs or {}, made))
        return made

    def replay(self) -> None:
        for func, args, kwargs, made in self.operations:
            again = func(*args, **kwargs)
            if not func._schema.is_mutable:
                for old, new in zip(tree_leaves(made), tree_leaves(again), strict=True):
                    if isinstance(old, torch.Tensor):
                        old.copy_(new)


class RecordedCapture:
    """Stand-in for `CudaCapture`."""

    def __init__(self, device: torch.device | None = None):
        self.captures = self.replays = 0

    def __call__(self, work: Callable[[], torch.Tensor]) -> Callable[[], None]:
        recording = Recording()
        with recording:
            work()
        assert recording.operations
        self.captures += 1

        def replay() -> None:
            self.replays += 1
            recording.replay()

        return replay
