"""How much memory a run will take, found without loading a weight (docs/decisions/011-memory-plan.md)."""
