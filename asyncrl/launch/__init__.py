"""From one command to a watched run. Reading order: `train` (checks, then both services) -> `supervisor` (what crashes
is started again) -> `processes` (children that never outlive us) -> `story` (what the run directory says) -> `panel`
(the three questions on a terminal)."""
