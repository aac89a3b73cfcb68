"""Descriptions of the visual tasks, the folder of their overlays, and of rewards by their names."""

from pathlib import Path

from asyncrl.plugins import Reward, TaskSet

TASKS = TaskSet(overlays=Path(__file__).with_name("overlays"))
BOXED_MATCH = Reward(implementation="asyncrl_plugins.tasks.answers:boxed_match")
CHOICE_MATCH = Reward(implementation="asyncrl_plugins.tasks.answers:choice_match")
