"""Lines of a memory plan, and what several parts of it count the same way."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.telemetry.numbers import GIB

CONTEXT_BYTES = 5 * GIB // 8
"""CUDA's context and the libraries' workspaces of a process that has used the device: 619 MiB on an H100 (CUDA 13)."""
ALLOCATOR_SHARE = 0.05
"""Share of the tensors that come and go which torch's allocator loses to rounding and gaps. An estimate."""
WORKING = "working memory"
"""Name of the line that a pass takes."""
STEPPING = "the optimiser's update, one copy of what is trained"


@dataclass(frozen=True)
class MemoryItem:
    name: str
    nbytes: int
    why: str = ""


@dataclass(frozen=True)
class Phase:
    """Peak memory of one device in one phase."""

    name: str
    lines: tuple[MemoryItem, ...]

    @property
    def nbytes(self) -> int:
        return sum(line.nbytes for line in self.lines)


def allocator(working: int) -> MemoryItem:
    return MemoryItem("allocator", int(ALLOCATOR_SHARE * working), f"{ALLOCATOR_SHARE:.0%} of it, an estimate")


def count(parameters: int) -> str:
    """`3.98 billion`"""
    return f"{parameters / 1e9:.3g} billion" if parameters >= 1e9 else f"{parameters / 1e6:.3g} million"


def servers_text(count: int) -> str:
    return f", {count} servers" if count > 1 else ""


def context(device: str, process: str, copies: int = 1) -> list[MemoryItem]:
    """Context memory of a process; `auto` counts as a GPU, even where there is none."""
    return [] if device == "cpu" else [MemoryItem(f"context of the {process}", copies * CONTEXT_BYTES, "an estimate")]
