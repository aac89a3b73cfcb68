"""Description of `environment.name=gymnasium`."""

from asyncrl.plugins import Part

ENVIRONMENT = Part(implementation="asyncrl_plugins.gymnasium.environment:GymnasiumEnvironment")
