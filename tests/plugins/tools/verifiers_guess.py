"""A taskset of the package verifiers with a harness of its own: three guesses, each answered, then a reward."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]
from openai import AsyncOpenAI

__all__ = ["GuessTaskset", "TalkHarness"]
GUESSES = 3


class GuessData(vf.TaskData):
    number: int


class GuessTask(vf.Task[GuessData]):
    @vf.reward
    async def guessed(self, trace: vf.Trace) -> float:
        """The share of guesses that are long enough."""
        said = [message.content or "" for message in trace.assistant_messages]
        return sum(len(text) >= self.data.number for text in said) / GUESSES


class GuessTaskset(vf.Taskset[GuessTask, vf.TasksetConfig]):
    def load(self) -> Iterator[GuessTask]:
        for number in range(4):
            yield GuessTask(GuessData(prompt=f"Say {number} signs.", number=number), self.config.task)


class TalkHarness(vf.Harness[vf.HarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, **kwargs) -> vf.ProgramResult:
        client = AsyncOpenAI(base_url=endpoint, api_key=secret)
        messages: list[dict] = [{"role": "user", "content": data.prompt}]
        for number in range(GUESSES):
            answer = await client.chat.completions.create(model=ctx.model, messages=messages)
            said = answer.choices[0].message.content or ""
            messages.append({"role": "assistant", "content": said})
            messages.append({"role": "user", "content": f"{number}: {len(said)} signs"})
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
