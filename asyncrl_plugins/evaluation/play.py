"""Episodes without a server, in this process: by hand in the terminal, or by a policy of the environment's own."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import signal
import statistics
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from asyncrl.config.environment import EnvironmentConfig
from asyncrl.config.sections import DataConfig
from asyncrl.environments.episodes import EnvironmentFailed, said_too_late
from asyncrl.environments.image_rule import ImageRule
from asyncrl.environments.interface import Action, Start
from asyncrl.environments.loading import LoadedEnvironment, load, source_of, waited
from asyncrl.environments.observation import Observation
from asyncrl.errors import UserError, did_you_mean
from asyncrl.user_functions import one_line
from asyncrl_plugins.evaluation.played_history import Past, PlayedHistory

if TYPE_CHECKING:
    from asyncrl.data.prompts import RenderedPrompt

T = TypeVar("T")
Policy = Callable[[Start, random.Random], Iterator[str]]
"""The text of each turn. Oracles know the start; none sees observations."""
Show = Callable[[str, Any], None]
AGAIN_S = 1.0
"""Seconds until plain code that has swallowed an interruption is interrupted again."""


@dataclass
class Played:
    """One episode that has ended."""

    end: str = ""
    """`done`, `limit turns`, `limit images`, `policy` where it has said all, or a failure, such as
    `environment_exception: ...`."""
    why: str = ""
    """Reason for the end, in words; empty where `end` suffices."""
    rewards: list[float] = field(default_factory=list)
    """Rewards of the turns; ignored where the environment failed."""
    calls: int = 0
    call_errors: int = 0
    images: int = 0
    """Images in observations, which environment.limits.images counts."""
    info: dict[str, Any] = field(default_factory=dict)
    close_error: str = ""
    """Error in the environment's `close`; the rewards count."""


def open_environment(config: EnvironmentConfig, unit: int) -> LoadedEnvironment:
    """The environment in this process. Raises UserError."""
    rule = ImageRule(unit, config.limits.image_pixels)
    return asyncio.run(load(config.name, config.config, source_of(config), rule))


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
    """A row of the environment's own data; where it makes none, the seed is all that episodes differ in. Raises
    UserError for what the author's `make_row` raises or may not return."""
    make = getattr(loaded.cls, "make_row", None)
    if make is None:
        return {"prompt": ""}
    called = f"{loaded.cls.__name__}.make_row({index}, {split!r})"
    try:
        row = make(index, split)
    except Exception as error:
        raise UserError(f"{called} fails: {one_line(error, loaded.file)}") from error
    if not isinstance(row, dict):
        raise UserError(f"{called} returned {type(row).__name__}, expected a dict, the row's columns")
    return row


def start_of(loaded: LoadedEnvironment, row: dict[str, Any], seed: int) -> Start:
    messages = [{"role": "user", "content": row.get("prompt", "")}]
    return Start(row=row, messages=messages, seed=seed, config=loaded.config)


def row_of_data(data: DataConfig, number: int) -> RenderedPrompt:
    """Row of `data.train_files` with the given number. Raises UserError."""
    from asyncrl.data.dataset import open_train
    from asyncrl.data.prompts import PromptRenderer

    rows = open_train(data, "environment")
    if not 0 <= number < len(rows):
        raise UserError(f"there is no row {number}: data.train_files has rows 0 to {len(rows) - 1}")
    return PromptRenderer(data).render(rows[number], rows.row_id(number))


def start_of_data(loaded: LoadedEnvironment, data: DataConfig, number: int, seed: int) -> Start:
    """Start of a run's episode at the given row: prompt, images, columns. Raises UserError."""
    from asyncrl.processing.bridge import start_of as start_of_prompt

    rendered = row_of_data(data, number)
    images = [rendered.blobs[digest] for digest in rendered.prompt.image_hashes]
    return replace(start_of_prompt(rendered.prompt, images, seed), config=loaded.config)


async def play(
    loaded: LoadedEnvironment, config: EnvironmentConfig, start: Start, turns: Iterator[str], show: Show
) -> Played:
    """One episode with the limits on turns, images and times, in the main thread. `show` is told of each part of it, by
    kind."""
    played = Played()
    times = config.timeouts
    environment: Any = None
    history = PlayedHistory(config)
    try:
        environment, opening = await _in_time(loaded.begin(start), "reset", times.step_s, "step_s")
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
            show("policy", text)
            result = await _in_time(loaded.step(environment, Action(text, number)), "step", times.step_s, "step_s")
            rewritten: tuple[Past, ...] = ()
            if result.observation is not None and not result.done:
                try:
                    rewritten = history.follow(text, result.observation, result.history)
                except UserError as error:
                    played.end = f"environment_observation: {error}"
                    break
            records: Any = result.info.get("calls", ())
            played.calls += len(records)
            played.call_errors += sum(bool(record["error"]) for record in records)
            played.rewards.append(result.reward)
            played.info = {key: value for key, value in result.info.items() if key != "calls"}
            show("reward", result)
            if result.done:
                played.end, played.why = "done", _why_done(loaded, records)
                break
            if rewritten and number + 1 < config.limits.turns:
                show("history", rewritten)
            _look(result.observation, played, show)
            if played.images > config.limits.images:
                played.end, played.why = "limit images", f"environment.limits.images is {config.limits.images}"
                break
    except EnvironmentFailed as failed:
        played.end = f"{failed.kind}: {failed}"
    except Exception as error:  # as a worker would say it
        played.end = f"environment_exception: {one_line(error, loaded.file)}"
    finally:
        if hasattr(environment, "close"):
            try:
                await _in_time(_close(environment), "close", times.step_s, "step_s")
            except EnvironmentFailed as failed:
                played.close_error = str(failed)
            except Exception as error:
                played.close_error = one_line(error, loaded.file)
    return played


async def _close(environment: Any) -> None:
    await waited(environment.close())


class _Interrupted(BaseException):
    """Raised in a plain method that holds the event loop too long. No Exception: the author's code may catch those."""


async def _in_time(doing: Awaitable[T], do: str, timeout_s: float, setting: str) -> T:
    """Result of a call within its time limit. Async code is cancelled; plain code, whose process a run kills, is
    interrupted by a signal, so that an author sees both end as in a run. Raises EnvironmentFailed."""

    def interrupt(number: int, frame: Any) -> None:
        if asyncio.current_task() is not None:  # else the loop waits, and cancels what is async by itself
            raise _Interrupted

    handler = signal.signal(signal.SIGALRM, interrupt)
    timer = signal.setitimer(signal.ITIMER_REAL, timeout_s, AGAIN_S)
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:  # not wait_for, whose task would be another: libraries with task groups want one
            return await doing
    except (_Interrupted, TimeoutError) as error:
        if isinstance(error, TimeoutError) and not limit.expired():
            raise
        raise EnvironmentFailed("environment_timeout", said_too_late(do, timeout_s, setting)) from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)


def _why_done(loaded: LoadedEnvironment, calls: Any) -> str:
    if loaded.tools and not calls:
        return "a turn without a call is the answer"
    return "the environment said so: done, or EpisodeOver"


def _look(observation: Observation | None, played: Played, show: Show) -> None:
    for message in observation.messages if observation else ():
        show("message", message.role)
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
