"""Production of groups: trajectories sampled, conversations with environments, rewards."""
