"""Workers: child processes that run user code, and end with everything that it has started.

Reading order:

1. `channel.py`  messages between a process and its workers, and the worker's end of them
2. `reaper.py`   a second process around each worker, so that nothing of it survives
3. `process.py`  one worker, seen from its parent: start, requests, reason of its end
4. `pool.py`     workers that take requests side by side; a lost one is replaced

Rewards (`asyncrl.rewards`) and environments (`asyncrl.environments`) say what a request is, and what its failure means.
Nothing is imported here: workers start through this package and must start fast.
"""
