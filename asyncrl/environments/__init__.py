"""Environments answer a model that takes several turns: an observation, a reward, or the end.

Reading order:

1. `observation.py`       what an environment answers, in plain types
2. `interface.py`         what its author works with: `Start`, `Action`, `ToolError`, `EpisodeOver`
3. `tool_schema.py`       from a typed function to a tool; `call_formats.py` from a text to calls of tools
4. `tool_environment.py`  an environment made of tools, and the base of those whose actions are calls
5. `image_rule.py`        one rule for the size of every image that is shown
6. `loading.py`           from the section `environment` to a class that is ready to begin episodes
7. `episodes.py`          `EnvironmentWorkers` and `Episode`, the part that a rollout server uses
8. `worker.py`            inside of a worker process (`asyncrl.workers`)
9. `calculator.py`        a tool by the name that `environment.tools` takes; plug-ins bring others

What fails of an environment (an exception, a hang, a lost worker) is an `EnvironmentFailed` of its trajectory:
counted, without a score, never a 0. What a policy does wrong is text that it reads.
"""
