"""Description of `environment.name=trl`."""

from asyncrl.plugins import Part

ENVIRONMENT = Part(implementation="asyncrl_plugins.trl.environment:TrlEnvironment")
