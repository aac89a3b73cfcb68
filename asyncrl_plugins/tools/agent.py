"""`name: agent` and `name: verifiers`: programs that call a model by OpenAI's chat completions, and end with a reward.

    environment:
      name: agent
      config: {run: mine/agent.py:run}

`run(task)`, async or plain, gets the address of its model, `task.base_url`, with the row and the seed, and returns the
reward. A command is a process that plays many episodes: it reads a line of JSON for each, {"id", "base_url", "row",
"seed"}, and prints {"id", "reward", "info"} or {"id", "error"}.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field, model_validator

from asyncrl import user_functions
from asyncrl.environments.image_rule import ImageRule
from asyncrl.environments.interface import Action, PromptTools, Start
from asyncrl.environments.observation import Observation, StepResult
from asyncrl.errors import UserError
from asyncrl.user_functions import one_line
from asyncrl_plugins.tools.call_formats import CallReader
from asyncrl_plugins.tools.chat_endpoint import Asked, ChatEndpoint, ChatSession
from asyncrl_plugins.tools.conversation import Conversation, first_messages
from asyncrl_plugins.tools.environment import call_record
from asyncrl_plugins.tools.prompt import CallSettings, prompt_tools, show_wish
from asyncrl_plugins.tools.schema import Tool
from protocol.nesting import read_json
from protocol.values import as_json

VERIFIERS_PROGRAM = Path(__file__).with_name("program.py")
MAX_LINE_BYTES = 16 << 20


@dataclass(frozen=True)
class AgentTask:
    """Input of an agent's episode."""

    base_url: str
    """Address of its model for a client of OpenAI's chat completions. The key may be anything."""
    row: dict[str, Any]
    seed: int


class AgentEnvironment:
    """The agent's requests are the turns: what it adds to the conversation is shown to the policy, and it reads what
    the policy says. An exception of it, or a request with another history, is a failure of the environment."""

    class Config(CallSettings):
        run: str = ""
        """`file.py:function`."""
        command: list[str] = Field(default_factory=list)
        """Program and arguments of a process that plays episodes; one in each worker."""
        tools: list[dict[str, Any]] = Field(default_factory=list)
        """Schemas of the tools that the agent has, as in its requests: the prompt tells of them."""
        host: str = "127.0.0.1"
        """Host on which the model is offered to agents."""
        folder: str = "."
        """Working directory of the command."""

        @model_validator(mode="after")
        def _check(self) -> AgentEnvironment.Config:
            if bool(self.command) == bool(self.run):
                raise ValueError("give either `run`, a function, or a command")
            return self

    starting: ClassVar[asyncio.Lock] = asyncio.Lock()
    endpoint: ClassVar[ChatEndpoint | None] = None
    program: ClassVar[_Program | None] = None
    function: ClassVar[Any] = None
    """Function that `run` names."""
    reader: ClassVar[CallReader]

    @classmethod
    async def prepare(cls, config: Any, image_rule: ImageRule) -> PromptTools | None:
        if config.run:
            function: Any = user_functions.resolve(config.run, {}, "environment.config.run", may_be_async=True)
            cls.function = staticmethod(function)
        try:
            functions = [tool["function"] for tool in config.tools]
            tools = [Tool(each["name"], each.get("description", ""), each["parameters"]) for each in functions]
        except (KeyError, TypeError) as error:
            raise UserError(
                f'environment.config.tools: expected {{"type": "function", "function": {{"name", "parameters"}}}}, '
                f"and {one_line(error)}"
            ) from error
        cls.reader = CallReader.of(config, "tool_call", tools)
        return prompt_tools(tools, cls.reader, show_wish(config))

    async def reset(self, start: Start) -> Observation | None:
        async with self.starting:
            if AgentEnvironment.endpoint is None:
                endpoint = ChatEndpoint()
                await endpoint.start(start.config.host)
                AgentEnvironment.endpoint = endpoint
        self._session = ChatSession()
        self._url = AgentEnvironment.endpoint.open(self._session)
        self._agent = asyncio.create_task(self._run(start.config, AgentTask(self._url, start.row, start.seed)))
        first = await self._next()
        if first is None:
            raise RuntimeError("the agent ended without asking the policy for anything")
        self._asked = first
        self._conversation = Conversation(first.messages, first.messages)
        return first_messages(first.messages, start.messages)

    async def step(self, action: Action) -> StepResult:
        calls = self.reader.calls(action)
        message = self._session.answer(self._asked, action, calls)
        self._conversation.messages = [*self._asked.messages, message]
        records: dict[str, object] = {}
        if calls:
            records["calls"] = [call_record(call, call.error, "malformed" if call.error else "") for call in calls]
        asked = await self._next()
        if asked is None:
            reward, info = self._agent.result()
            return StepResult(None, reward, done=True, info=records | info)
        self._asked = asked
        observation, history = self._conversation.goes_on(asked.messages)
        return StepResult(observation, info=records, history=history)

    async def close(self) -> None:
        if not hasattr(self, "_url"):
            return
        assert self.endpoint is not None
        self.endpoint.close(self._url)
        self._agent.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await self._agent

    async def _next(self) -> Asked | None:
        """The agent's next request; None where it has ended. Raises what it raised."""
        asking = asyncio.create_task(self._session.requests.get())
        try:
            await asyncio.wait({asking, self._agent}, return_when=asyncio.FIRST_COMPLETED)
            if asking.done():
                return asking.result()
            self._agent.result()
            return None
        finally:
            asking.cancel()

    async def _run(self, config: Any, task: AgentTask) -> tuple[float, dict[str, object]]:
        """The agent's reward and facts."""
        if config.command:
            if AgentEnvironment.program is None:
                AgentEnvironment.program = _Program(config.command, config.folder)
            said = await AgentEnvironment.program.play(task)
            reward, info = said.get("reward"), said.get("info", {})
        else:
            plain = not asyncio.iscoroutinefunction(self.function)
            reward, info = await (asyncio.to_thread(self.function, task) if plain else self.function(task)), {}
        if isinstance(reward, bool) or not isinstance(reward, int | float):
            raise TypeError(f"the agent ended with {reward!r:.80}, expected its reward, a number")
        return float(reward), info


class VerifiersEnvironment(AgentEnvironment):
    """A taskset and its harness of the package verifiers 0.4, in a Python of their own."""

    class Config(CallSettings):  # pyright: ignore[reportIncompatibleVariableOverride]
        taskset: dict[str, Any]
        """verifiers' `env.taskset`: `id` names an installed module, or a file in the `folder`."""
        folder: str = "."
        agent: dict[str, Any] = Field(default_factory=dict)
        """verifiers' `env.agent`, such as `{harness: {id: bash}}`."""
        python: str = sys.executable
        """Python of the virtual environment that has verifiers, which asks for other releases of mcp and openai."""
        tools: list[dict[str, Any]] = Field(default_factory=list)
        host: str = "127.0.0.1"

        run: ClassVar[str] = ""

        @property
        def command(self) -> list[str]:
            wanted = json.dumps({"taskset": self.taskset, "agent": self.agent})
            return [self.python, str(VERIFIERS_PROGRAM), wanted]


class _Program:
    """A process that plays episodes, by a line of JSON each way. It is started with the first one, and again if it has
    ended; the worker's end is its end."""

    def __init__(self, command: list[str], folder: str) -> None:
        self._command, self._folder = command, folder
        self._numbers = itertools.count()
        self._playing: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._starting = asyncio.Lock()
        self._reading: asyncio.Task[None] | None = None

    async def play(self, task: AgentTask) -> dict[str, Any]:
        """Answer to one episode. Raises RuntimeError where it is an error, or the process has ended."""
        async with self._starting:
            if self._process is None or self._process.returncode is not None:
                self._process = await asyncio.create_subprocess_exec(
                    *self._command, stdin=-1, stdout=-1, cwd=self._folder, limit=MAX_LINE_BYTES
                )
                self._reading = asyncio.create_task(self._read(self._process))
        number = next(self._numbers)
        waiting = self._playing[number] = asyncio.get_running_loop().create_future()
        line = {"id": number, "base_url": task.base_url, "row": as_json(task.row), "seed": task.seed}
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(line).encode() + b"\n")
            await self._process.stdin.drain()
            said = await waiting
        finally:
            self._playing.pop(number, None)
        if said.get("error"):
            raise RuntimeError(f"the agent failed: {said['error']}")
        return said

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        try:
            while line := await process.stdout.readline():
                self._take(read_json(line))
            ended = f"its process ended with {await process.wait()}"
        except (KeyError, TypeError, ValueError) as error:  # also of a line over MAX_LINE_BYTES
            process.kill()
            ended = f"its process printed a line that is no answer ({one_line(error)}), and was killed"
            await process.wait()
        for waiting in self._playing.values():
            if not waiting.done():
                waiting.set_result({"error": ended})

    def _take(self, said: dict[str, Any]) -> None:
        waiting = self._playing.get(said["id"])
        if waiting is not None and not waiting.done():
            waiting.set_result(said)
