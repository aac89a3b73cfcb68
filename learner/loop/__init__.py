"""The loop around the learner's step: trainer, work between steps, checkpoints, and going on after a stop.

Reading order: `trainer` (engines, roles and the step) -> `step_schedule` (between two steps) -> `saver` (checkpoints)
-> `resume` (a starting point from checkpoint and journal) -> `follower` (ranks other than 0).
"""
