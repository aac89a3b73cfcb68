"""Description of the visual tasks: the folder of their overlays."""

from pathlib import Path

from asyncrl.plugins import TaskSet

TASKS = TaskSet(overlays=Path(__file__).with_name("overlays"))
