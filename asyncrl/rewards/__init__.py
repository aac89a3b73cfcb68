"""Rewards: plain functions `def reward(sample, **kwargs) -> float`, run in processes that can be killed.

Reading order:

1. `sample.py`   what a reward function is given, and how it is made of a completion
2. `builtin.py`, `shaping.py`  the rewards that come with asyncrl, and examples of how to write one
3. `spec.py`     from the name in the configuration to a function; `calls.py` calls it
4. `pool.py`     `RewardPool.group(size).score(index, sample) -> Score`, the part that the rollout server uses
5. `worker_pool.py`, `worker_process.py`  worker processes, seen from the pool; `channel.py` is their messages
6. `worker.py`   inside such a process; `process_reaper.py` sees that nothing survives it

A reward that raises, hangs, runs out of memory, kills its process or returns no finite number makes
*its* trajectory an `error` or `timed_out`, which is counted and left out of training. It is never a 0.

Nothing is imported here: workers start through this package and must start fast.
"""
