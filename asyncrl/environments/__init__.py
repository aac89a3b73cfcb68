"""Environments answer a model that takes several turns: an observation, a reward, or the end.

Reading order:

1. `observation.py`       what an environment answers, in plain types
2. `interface.py`         what its author works with: `Start`, `Action`, `ToolError`, `EpisodeOver`
3. `tool_schema.py`       from a typed function to a tool; `call_formats.py` from a text to calls of tools
4. `tool_environment.py`  an environment made of tools, and the base of those whose actions are calls
5. `image_rule.py`        one rule for the size of every image that is shown
"""
