"""Descriptions of `environment.name=agent` and `environment.name=verifiers`."""

from asyncrl.plugins import Part

AGENT = Part(implementation="asyncrl_plugins.verifiers.agent:AgentEnvironment")
VERIFIERS = Part(implementation="asyncrl_plugins.verifiers.agent:VerifiersEnvironment")
