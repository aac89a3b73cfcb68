"""Plays episodes of the package verifiers 0.4 against an address that it is given; started by `agent.py`.

    PYTHON program.py '{"taskset": {"id": "mine"}}'              lines of JSON in and out, an episode each
    PYTHON program.py '{"taskset": {"id": "mine"}}' --rows 100   prints rows of a data set: prompt, task

Runs with the Python that has verifiers, so it imports nothing of asyncrl. A row names its task by its place in the
taskset, in the column `task`. Its reward is that of the episode's traces that are to be trained.
"""

from __future__ import annotations

import asyncio
import json
import sys
from itertools import islice

sys.path.pop(0)  # the folder of this file, where `mcp` is another module
sys.path.insert(0, "")  # tasksets of the working directory

import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]
from verifiers.v1.clients import EvalClientConfig, ModelContext  # pyright: ignore[reportMissingImports]
from verifiers.v1.utils.loaders import load_environment, resolve_env_config  # pyright: ignore[reportMissingImports]


async def play(env: vf.Env, tasks: list, order: dict) -> dict:
    client = EvalClientConfig(base_url=order["base_url"], api_key_var="UNUSED")
    episode = await env.run_episode(tasks[order["row"]["task"]], ModelContext(model="policy", client=client))
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if errors or not episode.ok:
        return {"id": order["id"], "error": "; ".join(f"{each.type}: {each.message}" for each in errors) or "not ok"}
    trained = [trace for trace in episode.traces if getattr(trace.agent, "trainable", True)]
    rewards = {name: each.value for trace in trained for name, each in trace.rewards.items() if each is not None}
    return {"id": order["id"], "reward": sum(trace.reward for trace in trained), "info": {"rewards": rewards}}


async def serve(env: vf.Env, tasks: list) -> None:
    """Play all episodes that are asked for, beside each other, until the pipe closes."""
    loop = asyncio.get_running_loop()
    playing: set[asyncio.Task[None]] = set()

    async def one(order: dict) -> None:
        try:
            said = await play(env, tasks, order)
        except Exception as error:  # of the taskset, the harness or the package: the episode's failure
            said = {"id": order["id"], "error": f"{type(error).__name__}: {error}"}
        print(json.dumps(said), file=answers, flush=True)

    async with env.serving():
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            task = asyncio.create_task(one(json.loads(line)))
            playing.add(task)
            task.add_done_callback(playing.discard)


def row(number: int, task: vf.Task) -> dict:
    if not isinstance(task.data.prompt, str):
        raise SystemExit(f"task {number} has no prompt of text")
    system = [{"role": "system", "content": task.data.system_prompt}] if task.data.system_prompt else []
    return {"prompt": [*system, {"role": "user", "content": task.data.prompt}], "task": number, "answer": ""}


if __name__ == "__main__":
    answers, sys.stdout = sys.stdout, sys.stderr  # whatever else is printed is no answer
    wanted = json.loads(sys.argv[1])
    # Without a runtime verifiers means a remote one, which needs an account and a tunnel.
    agent = {"runtime": {"type": "subprocess"}, **wanted.get("agent", {})}
    env = load_environment(resolve_env_config({**wanted, "agent": agent}))
    if sys.argv[2:3] == ["--rows"]:
        for number, task in enumerate(islice(env.taskset, int(sys.argv[3]))):
            print(json.dumps(row(number, task)), file=answers)
    else:
        asyncio.run(serve(env, list(env.taskset)))
