"""Lines of a memory plan, and what several parts of it count the same way."""

from __future__ import annotations

from dataclasses import dataclass

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
