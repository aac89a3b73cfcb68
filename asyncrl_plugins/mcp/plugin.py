"""Description of `environment.name=mcp`."""

from asyncrl.plugins import Part

ENVIRONMENT = Part(implementation="asyncrl_plugins.mcp.environment:McpEnvironment", facts={"may_reward": False})
