"""Episodes without a server, in this process: by hand in the terminal, or by a policy of the environment's own."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncrl.config.suggest import did_you_mean
from asyncrl.environments.call_formats import parse_calls
from asyncrl.environments.image_rule import ImageRule
from asyncrl.environments.interface import Action, Start
from asyncrl.environments.loading import LoadedEnvironment, load, sources_of
from asyncrl.environments.observation import Observation, check_history
from asyncrl.environments.settings import EnvironmentConfig
from asyncrl.environments.tool_environment import ToolEnvironment, waited
from asyncrl.errors import UserError
from asyncrl.plugins import one_line

Policy = Callable[[Start, random.Random], Iterator[str]]
"""The text of each turn. Oracles know the start; none sees observations."""
Show = Callable[[str, Any], None]


@dataclass
class Played:
    """One episode that has ended."""

    end: str = ""
    """`done`, `limit turns`, `limit images`, `policy` where it has said all, or a failure, such as
    `environment_exception: ...`."""
    why: str = ""
    """What ended it, in words; empty where `end` says it."""
    rewards: list[float] = field(default_factory=list)
    """Of the turns; they count for nothing where the environment failed."""
    calls: int = 0
    call_errors: int = 0
    images: int = 0
    """In observations, which environment.limits.images counts."""
    info: dict[str, Any] = field(default_factory=dict)


def open_environment(config: EnvironmentConfig, unit: int) -> LoadedEnvironment:
    """The environment in this process. Raises UserError."""
    rule = ImageRule(unit, config.limits.image_pixels)
    return asyncio.run(load(config, sources_of(config), rule))


def policy_of(loaded: LoadedEnvironment, name: str) -> Policy:
    """A policy by its name in the class's `policies`. Raises UserError."""
    policies: dict[str, Policy] = getattr(loaded.cls, "policies", {})
    if name not in policies:
        raise UserError(
            f"{loaded.cls.__name__} has no policy {name!r}.{did_you_mean(name, policies)} "
            f"Its `policies` are {', '.join(policies) or 'none'}"
        )
    return policies[name]


def make_row(loaded: LoadedEnvironment, index: int, split: str) -> dict[str, Any]:
    """A row of the environment's own data; where it makes none, the seed is all that episodes differ in."""
    made = getattr(loaded.cls, "make_row", None)
    return made(index, split) if made else {"prompt": ""}


def start_of(loaded: LoadedEnvironment, row: dict[str, Any], seed: int) -> Start:
    messages = [{"role": "user", "content": row.get("prompt", "")}]
    return Start(row=row, messages=messages, seed=seed, config=loaded.config)


async def play(
    loaded: LoadedEnvironment, config: EnvironmentConfig, start: Start, turns: Iterator[str], show: Show
) -> Played:
    """One episode with the limits on turns and images. `show` is told of each part of it, by kind."""
    played = Played()
    environment: Any = None
    answers: list[Observation] = []
    """What followed each turn."""
    try:
        environment, opening = await loaded.begin(start)
        _look(opening, played, show)
        played.images = 0  # those of the opening are part of the prompt, in a run, too
        for number in itertools.count():
            if number == config.limits.turns:
                played.end, played.why = "limit turns", f"environment.limits.turns is {number}"
                break
            show("turn", number)
            text = next(turns, None)
            if text is None:
                played.end, played.why = "policy", "no turn follows"
                break
            action = Action(text, parse_calls(loaded.call_format, text, loaded.schemas), number)
            show("action", action)
            result = await loaded.step(environment, action)
            if result.observation is not None and not result.done:
                try:
                    seen = {image for answer in answers for image in answer.images}
                    check_history(result.history, [*answers, Observation(())], seen)
                except UserError as error:
                    played.end = f"environment_observation: {error}"
                    break
                answers.append(result.observation)
            played.calls += len(action.calls)
            records: Any = result.info.get("calls", ())
            played.call_errors += sum(bool(record["error"]) for record in records)
            played.rewards.append(result.reward)
            played.info = {key: value for key, value in result.info.items() if key != "calls"}
            show("reward", result)
            if result.done:
                played.end, played.why = "done", _why_done(environment, action)
                break
            _look(result.observation, played, show)
            if played.images > config.limits.images:
                played.end, played.why = "limit images", f"environment.limits.images is {config.limits.images}"
                break
    except Exception as error:  # as a worker would say it
        played.end = f"environment_exception: {one_line(error, loaded.file)}"
    finally:
        if hasattr(environment, "close"):
            await waited(environment.close())
    return played


def _why_done(environment: Any, action: Action) -> str:
    if isinstance(environment, ToolEnvironment) and not action.calls:
        return "a turn without a call is the answer"
    return "the environment said so: done, or EpisodeOver"


def _look(observation: Observation | None, played: Played, show: Show) -> None:
    for message in observation.messages if observation else ():
        for part in message.parts:
            played.images += isinstance(part, bytes)
            show(message.role, part)


def baseline(
    loaded: LoadedEnvironment, config: EnvironmentConfig, policy: Policy, episodes: int, seed: int, split: str
) -> str:
    """Monte-Carlo estimate of what a policy gets, as a table. Raises UserError where the environment fails."""

    async def run() -> list[Played]:
        found: list[Played] = []
        for index in range(episodes):
            start = start_of(loaded, make_row(loaded, seed * 1_000_000 + index, split), seed * 1_000_000 + index)
            turns = policy(start, random.Random(f"{seed} {index}"))
            found.append(await play(loaded, config, start, turns, lambda kind, part: None))
            if found[-1].end.startswith("environment_"):
                raise UserError(f"episode {index}: {found[-1].end}")
        return found

    played = asyncio.run(run())
    lines = [f"{len(played)} episodes of {split}", _mean("reward", [sum(each.rewards) for each in played])]
    lines += [_mean("turns", [len(each.rewards) for each in played]), _mean("calls", [each.calls for each in played])]
    keys = [key for key, value in played[-1].info.items() if isinstance(value, bool | int | float)]
    lines += [_mean(key, [float(each.info.get(key, 0)) for each in played]) for key in keys]
    ends = Counter(each.end for each in played)
    lines.append("ends         " + ", ".join(f"{end} {count}" for end, count in ends.most_common()))
    return "\n".join(lines)


def _mean(name: str, values: Sequence[float]) -> str:
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return f"{name:<12} {statistics.fmean(values):.4f} ± {error:.4f}"


class Terminal:
    """Prints an episode; images are files in `folder`, which are named where they stand."""

    def __init__(self, folder: Path, unit: int) -> None:
        self._folder = folder
        self._unit = unit
        self._images = 0

    def __call__(self, kind: str, part: Any) -> None:
        match kind:
            case "turn":
                print(f"--- turn {part}")
            case "action":
                for call in part.calls:
                    print(f"    call {call.error or f'{call.name} {call.arguments}'}")
                if not part.calls:
                    print("    no call")
            case "reward":
                print(f"    reward {part.reward:g}{', done' if part.done else ''}   {_plain(part.info)}")
            case _ if isinstance(part, bytes):
                print(f"  {kind}: {self._image(part)}")
            case _:
                print(f"  {kind}: {part}")

    def _image(self, data: bytes) -> str:
        from asyncrl.data.images import image_size

        width, height = image_size(data, "an image")
        suffix = "png" if data.startswith(b"\x89PNG") else "jpg"
        path = self._folder / f"{self._images:03d}.{suffix}"
        path.write_bytes(data)
        tokens = round(width / self._unit) * round(height / self._unit)
        number, self._images = self._images, self._images + 1
        return f"[image {number}: {width} x {height}, about {tokens} tokens, {path}]"


def _plain(info: dict[str, Any]) -> str:
    shown = [f"{key}={value}" for key, value in info.items() if key != "calls"]
    return " ".join(shown)


def typed_turns() -> Iterator[str]:
    """Turns from the terminal, until its end. A line that ends with a backslash goes on in the next."""
    lines: list[str] = []
    while True:
        try:
            lines.append(input(". " if lines else "> "))
        except EOFError:
            return
        if not lines[-1].endswith("\\"):
            yield "\n".join(line.removesuffix("\\") for line in lines)
            lines = []
