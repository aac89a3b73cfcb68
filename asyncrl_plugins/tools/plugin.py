"""Descriptions of environments whose actions are calls of tools."""

from asyncrl.plugins import Part

AGENT = Part(implementation="asyncrl_plugins.tools.agent:AgentEnvironment")
MCP = Part(
    implementation="asyncrl_plugins.tools.mcp:McpEnvironment", facts={"may_reward": False, "asks_a_server": True}
)
OPENENV = Part(implementation="asyncrl_plugins.tools.openenv:OpenEnvEnvironment", facts={"asks_a_server": True})
TOOLS = Part(implementation="asyncrl_plugins.tools.functions:FunctionsEnvironment", facts={"may_reward": "answer"})
TRL = Part(implementation="asyncrl_plugins.tools.trl:TrlEnvironment")
VERIFIERS = Part(implementation="asyncrl_plugins.tools.agent:VerifiersEnvironment")
