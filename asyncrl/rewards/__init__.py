"""Rewards: plain functions `def reward(sample, **kwargs) -> float`, run in processes that can be killed.

Reading order:

1. `sample.py`   what a reward function is given, and how it is made of a completion
2. `builtin.py`  the rewards that come with asyncrl, and examples of how to write one
3. `spec.py`     from the name in the configuration to a function, and the call of it
4. `scorer.py`   `RewardScorer.group(size).score(index, sample) -> Score`, the part that the rollout server uses
5. `process_scorer.py`  components from worker processes (`asyncrl.workers`); `worker.py` is inside of one

A reward that raises, hangs, runs out of memory, kills its process or returns no finite number makes
*its* trajectory an `error` or `timed_out`, which is counted and left out of training. It is never a 0.

Nothing is imported here: workers start through this package and must start fast.
"""
