"""The mathematics of learning, as pure functions on flat tensors.

Only tokens that the policy sampled, in rows that were scored, ever reach these functions: `[N]` runs over those
tokens, `[B]` over trajectories, and `row[N]` says which trajectory a token belongs to. There is nothing to mask.
Reading order: `advantages` -> `ratios` -> `corrections` -> `losses` -> `diagnostics`.
"""
