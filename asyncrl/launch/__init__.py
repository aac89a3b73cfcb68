"""From one command to a watched run. Reading order: `train` (checks, then both services) -> `processes` (children that
never outlive us) -> `story` (what the run directory says) -> `panel` (the three questions on a terminal)."""
