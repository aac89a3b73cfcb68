"""Stand-in for SGLang's compiled kernels, where there are none: its package `sgl_kernel` on a CPU.

No such package of SGLang 0.5.23 exists for CPUs on PyPI. Its CPU engine imports one by name, and without Intel's AMX
computes in torch whatever it finds no kernel for. `scripts/install_sglang.sh` puts this file there.
"""

from typing import Any

import torch

IS_ASYNCRL_STAND_IN = True


def assign_req_to_token_pool_cpu(rows: Any, table: Any, starts: Any, ends: Any, values: Any, _width: Any) -> None:
    """Write each request's new token places, which follow each other in `values`, into its row of `table`."""
    at = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        table[row, start:end] = values[at : at + end - start].to(table.dtype)
        at += end - start


def __getattr__(name: str) -> Any:
    if not name.endswith("_cpu"):  # SGLang asks for the others to find out whether it may use them
        raise AttributeError(name)

    def refuse(*_arguments: Any, **_named: Any) -> None:
        raise NotImplementedError(f"sgl_kernel.{name} needs SGLang's compiled kernels, and this is asyncrl's stand-in")

    return refuse


class _Operators:
    def __getattr__(self, name: str) -> Any:
        return __getattr__(name)


_operators: Any = torch.ops
_operators.sgl_kernel = _Operators()
