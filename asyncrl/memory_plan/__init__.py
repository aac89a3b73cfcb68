"""How much memory a run will take, found without loading a weight (docs/decisions/011-memory-plan.md)."""

GIB = 2**30


def size(nbytes: float) -> str:
    """Format bytes: 12.3 GiB or 4.5 MiB."""
    return f"{nbytes / GIB:,.1f} GiB" if nbytes >= GIB else f"{nbytes / 2**20:,.1f} MiB"
