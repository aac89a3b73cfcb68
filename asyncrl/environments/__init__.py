"""Environments answer a model that takes several turns: an observation, a reward, or the end.

Reading order:

1. `observation.py`       what an environment answers, in plain types
2. `interface.py`         what its author works with: `Start`, `Action`, `ToolError`, `EpisodeOver`, `PromptTools`
3. `image_rule.py`        one rule for the size of every image that is shown
4. `loading.py`           from the section `environment` to a class that is ready to begin episodes
5. `episodes.py`          `EnvironmentWorkers` and `Episode`, the part that a rollout server uses
6. `worker.py`            inside of a worker process (`asyncrl.workers`)

The plug-in `tools` makes environments of functions that the policy calls.

What fails of an environment (an exception, a hang, a lost worker) is an `EnvironmentFailed` of its trajectory:
counted, without a score, never a 0. What a policy does wrong is text that it reads.
"""
