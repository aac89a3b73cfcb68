"""Hostile input to every decoder, in this process: `python -m tests.rigs.hostile_decoders --inputs 20000 --seed 1`.

Messages of both sides, replies of workers, requests of agents and lines of their programs, answers of OpenEnv servers
and judges, results of programs and calls of policies: each decoder gets so many damaged inputs, deeply nested ones
among them, and every other time from the bottom of a deep stack. Each answer is the decoder's value or an error of its
kind; nothing else is raised, no input takes seconds, and nothing is left behind. `tests.rigs.fuzz_wire` sends such
messages over sockets. With `--attacks` the tests of single attacks run, too. Exit code 1 names the problems.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

import msgpack
from aiohttp import web

from asyncrl.environments.episodes import EnvironmentFailed, Episode
from asyncrl.environments.interface import Action, ToolError
from asyncrl.rewards.process_scorer import ProcessScorer
from asyncrl.workers.process import WorkerDied, WorkerProcess
from asyncrl_plugins.judges.judge import Judge, UnusableReply, read_scores
from asyncrl_plugins.judges.judge_settings import JudgeSettings
from asyncrl_plugins.tasks.completions import literal
from asyncrl_plugins.tools import sandbox
from asyncrl_plugins.tools.agent import _Program
from asyncrl_plugins.tools.call_formats import parse_calls
from asyncrl_plugins.tools.chat_endpoint import ChatEndpoint, ChatSession
from asyncrl_plugins.tools.conversation import Conversation, OtherConversation, first_messages
from asyncrl_plugins.tools.openenv import OpenEnvEnvironment
from protocol.codec import Limits, decode
from protocol.errors import ProtocolError
from protocol.messages import ControlFromLearner, ControlFromServer, WeightsFromLearner, WeightsFromServer
from tests.rigs.fuzz import content
from tests.rigs.fuzz.mutations import deep_json, mutate, places
from tests.rigs.fuzz.rig import memory_mib

RSS_SLACK_MIB = 32.0
SLOWEST_S = 2.0
"""Time of this process for one input: on a busy machine, waits are not its own."""
DEEP_STACK = 500
"""Python's own limit is 1,000 frames."""
NASTY: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 2**63, 10**400, 0.5, 1e308, float("nan"), float("-inf")),
    *("", "x", "\x00", "\ud800", "ü" * 3000, [], {}, [[]], [None], {"a": 1}, ["x", 1]),
)
ATTACKS = (
    "tests/unit/protocol/test_protocol_codec.py",
    "tests/unit/learner/test_trajectory_requests.py",
    "tests/unit/learner/test_damaged_checkpoints.py",
    "tests/unit/asyncrl/test_lost_folder.py",
    "tests/unit/asyncrl/test_secrets.py",
    "tests/plugins/tools/test_sandbox.py",
    "tests/plugins/tools/test_chat_endpoint.py",
)
STARTED = [0.0]
"""Time at which the decoder got its input."""
Attack = Callable[[random.Random], Awaitable[object]]
SCHEMAS = {
    "crop": {"properties": {"box": {"type": "array"}, "image": {"type": "integer"}}},
    "one": {"properties": {"query": {"type": "string"}}},
    "python": {"properties": {"code": {"type": "string"}}},
}


def damaged(rng: random.Random, right: Any) -> Any:
    """A value with one to three changes somewhere in its tree, nested ones among them."""
    holder = {"": copy.deepcopy(right)}
    for _ in range(rng.choice((1, 1, 2, 3))):
        parent, key = rng.choice(list(places(holder)))
        parent[key] = _nested(rng) if rng.random() < 0.2 else copy.deepcopy(rng.choice(NASTY))
    return holder[""]


def _nested(rng: random.Random) -> Any:
    value: Any = 0
    for _ in range(rng.choice((10, 63, 65, 200, 300))):
        value = {"a": value} if rng.random() < 0.5 else [value]
    return value


def damaged_text(rng: random.Random, right: Any) -> str:
    """JSON of a damaged value, cut short, with other letters, or of any depth."""
    kind = rng.randrange(6)
    text = json.dumps(damaged(rng, right) if kind else right)
    if kind == 1:
        return text[: rng.randrange(len(text))]
    if kind == 2:
        at = rng.randrange(len(text))
        return text[:at] + rng.choice('{}[]",:\\0x\x00é') + text[at + 1 :]
    return deep_json(rng) if kind == 3 else text


def messages_of(expected: Any) -> Attack:
    async def attack(rng: random.Random) -> None:
        frames = mutate(rng, rng.choice(content.EXAMPLES))
        STARTED[:] = [time.process_time()]  # damage to a header of 60,000 numbers costs seconds
        decode(frames, expected, Limits())

    return attack


async def worker_reply(rng: random.Random) -> object:
    """A frame on a worker's pipe, and what the parent makes of the reply in it."""
    scores = {"id": 1, "seconds": 0.1, "scores": [{"components": {"a": 1.0}, "seconds": 0.1}], "counts": {"a/b": 1}}
    step = {"observation": [["tool", ["text", b"png"]]], "history": [[0, "said", None]], "reward": 0.5}
    step |= {"id": 1, "done": False, "state_key": b"k", "info": {"calls": []}}
    right = rng.choice((scores, step))
    value, frame = damaged(rng, right), rng.randbytes(20)
    with suppress(TypeError, ValueError, OverflowError):  # what MessagePack itself refuses
        frame = msgpack.packb(value, unicode_errors="surrogatepass") or b""
    if rng.random() < 0.2:
        frame = frame[: rng.randrange(len(frame) + 1)] + b"\x91" * rng.choice((10, 100, 2000))
    stdout, stderr = asyncio.StreamReader(), asyncio.StreamReader()
    stderr.feed_eof()
    pipe = SimpleNamespace(write=len, transport=SimpleNamespace(is_closing=lambda: True))
    ended = asyncio.get_running_loop().create_future()
    ended.set_result(0)
    process = SimpleNamespace(stdin=pipe, stdout=stdout, stderr=stderr, pid=1, returncode=None, wait=lambda: ended)
    worker = WorkerProcess(cast(Any, process), lambda nbytes: None)
    with worker.request({}) as request:
        stdout.feed_data(frame)
        stdout.feed_eof()
        reply = await request.reply(SLOWEST_S)
    await worker._reading
    if right is scores:
        scorer = ProcessScorer(cast(Any, None), 1.0, setting="reward.timeout_s")
        return scorer._scores(reply, 1, worker)

    async def ask(worker: Any, message: Any) -> Any:
        return reply

    episode = Episode(cast(Any, SimpleNamespace(ask=ask)))
    episode._worker = worker
    return await episode.step("text")


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
CHAT = {
    "model": "policy",
    "messages": [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}, IMAGE]},
        {"role": "assistant", "tool_calls": [{"id": "0", "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "0", "content": "4"},
    ],
    "n": 1,
    "stream": False,
}


async def chat_request(rng: random.Random) -> object:
    """A request to the chat endpoint; one that is taken is shown to the policy."""
    endpoint, session = ChatEndpoint(), ChatSession()
    endpoint._base = "http://a"
    secret, body = endpoint.open(session).split("/")[3], damaged_text(rng, CHAT).encode("utf-8", "surrogatepass")

    async def read() -> bytes:
        return body

    request = SimpleNamespace(match_info={"secret": secret}, read=read)
    task = asyncio.create_task(endpoint._complete(cast(Any, request)))
    asking = asyncio.create_task(session.requests.get())
    try:
        await asyncio.wait({task, asking}, return_when=asyncio.FIRST_COMPLETED, timeout=SLOWEST_S)
        if task.done():
            return task.result()
        messages = asking.result().messages
        first_messages(messages, [])
        return Conversation(messages[:1], messages[:1]).goes_on(messages)
    finally:
        asking.cancel()
        task.cancel()
        await asyncio.wait({task, asking})


async def agent_line(rng: random.Random) -> object:
    """Lines of an agent's program: whoever waits for one hears of it."""
    program = _Program(["nothing"], ".")
    waiting = program._playing[0] = asyncio.get_running_loop().create_future()
    stdout = asyncio.StreamReader()
    line = damaged_text(rng, {"id": 0, "reward": 1.0, "info": {"a": [1]}})
    stdout.feed_data(line.encode("utf-8", "surrogatepass") + b"\n")
    stdout.feed_eof()
    ended = asyncio.get_running_loop().create_future()
    ended.set_result(0)
    await program._read(cast(Any, SimpleNamespace(stdout=stdout, wait=lambda: ended, kill=lambda: None)))
    return waiting.result()


async def openenv_answer(rng: random.Random) -> object:
    right = {"type": "step", "data": {"observation": {"text": "x", "image": "aGk="}, "reward": 0.5, "done": False}}
    text = damaged_text(rng, right)

    async def send(said: str) -> None: ...

    async def receive() -> str:
        return text

    environment = OpenEnvEnvironment()
    environment._socket = SimpleNamespace(send=send, recv=receive)
    environment._config = SimpleNamespace(observe="", images=["image"], text=None, tool="act")
    answer = await environment._ask("step", {})
    return environment._seen(answer["observation"])


async def program_result(rng: random.Random) -> object:
    text = damaged_text(rng, {"shown": ["aGk="], "error": ""}).encode("utf-8", "surrogatepass")
    return sandbox._outcome(rng.choice((0, 1, -9)), b"confined\n" + text, "", sandbox.SandboxLimits())


async def policy_call(rng: random.Random) -> object:
    inner = damaged_text(rng, {"name": "crop", "arguments": {"box": [0, 0, 1, 1], "image": 1}})
    format_, text = rng.choice(
        (
            ("hermes", f"<tool_call>{inner}</tool_call>"),
            ("qwen_xml", f"<tool_call><function=crop><parameter=box>{inner}</parameter></function></tool_call>"),
            ("tag:one", f"<one>{inner}</one>"),
            ("python", f"```python\n{inner}\n```"),
            ("plain", f"one {inner}"),
        )
    )
    text = text[: rng.randrange(len(text))] if rng.random() < 0.2 else text
    return parse_calls(format_, Action(text).text, SCHEMAS)


async def judge_answer(rng: random.Random) -> object:
    judge, settings = Judge.__new__(Judge), JudgeSettings(url="http://a", model="m", json_key="s")
    judge._counts = Counter()
    said = {"choices": [{"message": {"content": json.dumps({"s": [1, 2]})}}], "usage": {"prompt_tokens": 5}}
    if rng.random() < 0.5:
        return judge._content(damaged_text(rng, said).encode("utf-8", "surrogatepass"))
    return read_scores(damaged_text(rng, {"s": [1, 2]}), 2, settings)


async def completion_value(rng: random.Random) -> object:
    return literal(damaged_text(rng, {"box": [1, 2, 3, 4], "label": "a"}))


DECODERS: dict[str, tuple[Attack, tuple[type[Exception], ...]]] = {
    "control, from servers": (messages_of(ControlFromServer), (ProtocolError,)),
    "control, from the learner": (messages_of(ControlFromLearner), (ProtocolError,)),
    "weights, from servers": (messages_of(WeightsFromServer), (ProtocolError,)),
    "weights, from the learner": (messages_of(WeightsFromLearner), (ProtocolError,)),
    "replies of workers": (worker_reply, (WorkerDied, EnvironmentFailed)),
    "requests of agents": (chat_request, (web.HTTPBadRequest, OtherConversation)),
    "lines of agents' programs": (agent_line, ()),
    "answers of OpenEnv": (openenv_answer, (ToolError, ConnectionError, ValueError, KeyError, TypeError)),
    "results of programs": (program_result, ()),
    "calls of policies": (policy_call, ()),
    "answers of judges": (judge_answer, (UnusableReply,)),
    "values in completions": (completion_value, ()),
}
"""Attack on each decoder, and the errors of its kind."""


async def attack_all(inputs: int, seed: int) -> dict[str, Any]:
    """Attack each decoder with so many inputs. Returns counts, and problems."""
    report: dict[str, Any] = {"decoders": {}, "problems": []}
    rss_mib, threads, files = memory_mib(), threading.active_count(), len(os.listdir("/proc/self/fd"))
    for name, (attack, allowed) in DECODERS.items():
        rng, outcomes, slowest_s = random.Random(f"{seed} {name}"), Counter[str](), 0.0
        for number in range(inputs):
            STARTED[:] = [time.process_time()]
            try:
                await (_deeply(attack, rng, DEEP_STACK) if number % 2 else attack(rng))
                outcomes["a value"] += 1
            except allowed as error:
                outcomes[type(error).__name__] += 1
            except Exception as error:  # the finding of this rig
                outcomes["other"] += 1
                report["problems"].append(f"{name}, input {number}: {type(error).__name__}: {error!s:.200}")
            slowest_s = max(slowest_s, time.process_time() - STARTED[0])
        if slowest_s > SLOWEST_S:
            report["problems"].append(f"{name}: an input took {slowest_s:.1f} s")
        report["decoders"][name] = {**outcomes, "slowest_ms": round(1000 * slowest_s, 1)}
        if name == next(iter(DECODERS)):
            rss_mib = memory_mib()
    left = len(asyncio.all_tasks()) - 1
    found = (threading.active_count() - threads, len(os.listdir("/proc/self/fd")) - files, left)
    if any(count > 0 for count in found):
        report["problems"].append(f"left behind: {found[0]} threads, {found[1]} open files, {found[2]} tasks")
    if (grown := memory_mib() - rss_mib) > RSS_SLACK_MIB:
        report["problems"].append(f"resident memory grew by {grown:.0f} MiB after the first decoder")
    report["grown_mib"] = round(grown, 1)
    return report


def _deeply(attack: Attack, rng: random.Random, frames: int) -> Awaitable[object]:
    """Call from the bottom of a stack: of what is async, the part before its first wait runs there."""

    async def step(left: int) -> object:
        return await (step(left - 1) if left else attack(rng))

    return step(frames)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=20_000, help="to each decoder")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--attacks", action="store_true", help="run the tests of single attacks, too")
    arguments = parser.parse_args()
    report = asyncio.run(attack_all(arguments.inputs, arguments.seed))
    print(json.dumps(report, indent=2))
    code = 1 if report["problems"] else 0
    if arguments.attacks:
        code |= subprocess.run([sys.executable, "-m", "pytest", "-q", "-n", "0", *ATTACKS]).returncode
    print(f"{arguments.inputs:,} inputs to each of {len(DECODERS)} decoders; problems: {len(report['problems'])}")
    return code


if __name__ == "__main__":
    sys.exit(main())
