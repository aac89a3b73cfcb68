"""Description of the tool `python` in `environment.tools`."""

from asyncrl.plugins import Part

PYTHON = Part(implementation="asyncrl_plugins.python_tool.sandbox:python")
