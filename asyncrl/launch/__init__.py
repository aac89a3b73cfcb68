"""From one command to a watched run. Reading order: `train` (checks, then both services) -> `supervisor` (what crashes
is started again) -> `processes` (children that never outlive us). asyncrl/tools/panel shows the run meanwhile."""
