"""Description of `environment.name=openenv`."""

from asyncrl.plugins import Part

ENVIRONMENT = Part(implementation="asyncrl_plugins.openenv.environment:OpenEnvEnvironment")
