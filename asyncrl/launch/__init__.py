"""Start and watch a run with one command. Reading order: `train` (checks, then both services) -> `supervisor` (what
crashes is started again) -> `processes` (children that never outlive us). `display` shows
the run meanwhile."""
