"""Methods for policies that see: NoisyRollout distorts the images of some trajectories, PAPO masks those of a pass."""
