"""The worker process: `python -m asyncrl.rewards.worker`, started by `worker_process.py` only.

Loads every configured function once, then scores one sample after another until its stdin closes.
"""

from __future__ import annotations

import io
import math
import numbers
import os
import random
import resource
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

from asyncrl.errors import UserError
from asyncrl.plugins import function_of, load_module, one_line, shorten
from asyncrl.rewards import channel, process_reaper
from asyncrl.rewards.builtin import BUILTIN_REWARDS
from asyncrl.rewards.sample import RewardSample
from asyncrl.rewards.spec import call_reward, check_call


@dataclass(frozen=True)
class Component:
    name: str
    function: Callable[..., Any]
    kwargs: dict[str, Any]
    file: str
    """The user's file, for naming lines in it; empty for a built-in."""


class ComponentFailed(Exception):
    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    process_reaper.fork_guarded()
    incoming, outgoing = _take_channel()
    code = 0
    try:
        serve(incoming, outgoing)
    except BaseException:  # ends the worker, which the pool reports; the log has the whole traceback
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    os._exit(code)  # threads and exit handlers of user code must not hold the worker


def serve(incoming: BinaryIO, outgoing: BinaryIO) -> None:
    messages = channel.unpacker(incoming)
    setup = next(messages, None)
    if setup is None:
        return
    try:
        components = _load(setup)
    except UserError as error:
        _send(outgoing, {"ready": False, "message": shorten(_with_memory_hint(error), limit=4000)})
        return
    _send(outgoing, {"ready": True})
    for request in messages:
        reply = _score(request, components, outgoing)
        _send(outgoing, reply)
        if reply.get("error_kind") == "reward_memory":
            return  # what filled the memory may still be held; the pool starts a fresh worker


def _take_channel() -> tuple[BinaryIO, BinaryIO]:
    """Move the pipes away from stdin and stdout, so that prints of user code go to the log (stderr)."""
    incoming, outgoing = os.dup(0), os.dup(1)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # else a killed worker's prints are lost

    def close_in_forks() -> None:
        os.close(incoming)
        os.close(outgoing)

    os.register_at_fork(after_in_child=close_in_forks)
    return os.fdopen(incoming, "rb", buffering=0), os.fdopen(outgoing, "wb")


def _load(setup: dict[str, Any]) -> list[Component]:
    limit = setup["memory_limit_mib"] << 20
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    modules: dict[str, ModuleType] = {}  # two functions of one file share its globals
    components = []
    for entry in setup["components"]:
        path = entry["path"]
        if not path:
            function = BUILTIN_REWARDS[entry["function"]]
        else:
            if path not in modules:
                modules[path] = load_module(Path(path), entry["source"], entry["package"])
            function = function_of(modules[path], entry["function"])
        check_call(function, entry["function"], entry["kwargs"])
        components.append(Component(entry["name"], function, entry["kwargs"], path))
    return components


def _with_memory_hint(error: UserError) -> str:
    starved = isinstance(error.__cause__, MemoryError) or "failed to map segment" in str(error)
    return f"{error}. Workers may use {_limit_mib()} MiB: raise reward.memory_limit_mib" if starved else str(error)


def _limit_mib() -> int:
    return resource.getrlimit(resource.RLIMIT_AS)[0] >> 20


def _score(request: dict[str, Any], components: list[Component], outgoing: BinaryIO) -> dict[str, Any]:
    me = os.getpid()
    sample = RewardSample(**request["sample"])
    reply: dict[str, Any] = {"id": request["id"], "components": {}}
    dicts: list[tuple[Component, Mapping[str, Any]]] = []
    started = time.perf_counter()
    for index, component in enumerate(components):
        _send(outgoing, {"begun": index})
        try:
            reply["components"][component.name] = _run(component, sample, dicts)
        except ComponentFailed as failed:
            reply |= {"error_kind": failed.kind, "error_message": str(failed)}
            break
        finally:
            if os.getpid() != me:  # the reward forked, and this is the copy; the original answers
                os._exit(0)
    reply["seconds"] = time.perf_counter() - started
    return reply


def _run(component: Component, sample: RewardSample, dicts: list[tuple[Component, Mapping[str, Any]]]) -> float:
    """The component's finite number. Raises ComponentFailed for everything else that can happen in user code.

    A function that returns a dict is called once for all its components; `dicts` are those of the sample.
    """
    alike = (
        values for other, values in dicts if (other.function, other.kwargs) == (component.function, component.kwargs)
    )
    # A reward that draws random numbers must not depend on which worker scored what before.
    random.seed(f"{sample.row_id}\0{sample.completion}".encode("utf-8", "surrogatepass"))
    try:
        returned = next(alike, None)
        if returned is None:
            returned = call_reward(component.function, sample, component.kwargs)
        if isinstance(returned, Mapping):
            dicts.append((component, returned))
            returned = _of_name(returned, component.name)
        value = _number(returned)
    except ComponentFailed:
        raise
    except MemoryError as error:
        raise ComponentFailed(
            "reward_memory",
            f"over the limit of {_limit_mib()} MiB (reward.memory_limit_mib): {one_line(error, component.file)}",
        ) from None
    except BaseException as error:  # also SystemExit: user code must not decide about this process
        raise ComponentFailed("reward_exception", one_line(error, component.file)) from None
    if not math.isfinite(value):
        raise ComponentFailed("reward_nan", f"returned {value}, which is not a finite number")
    return value


def _of_name(values: Mapping[str, Any], name: str) -> Any:
    if not values:
        fix = "Return a number under every component's name, or raise what keeps this completion from a score"
        raise ComponentFailed("reward_type", f"returned an empty dict, without {name!r}. {fix}")
    if name not in values:
        known = ", ".join(map(str, values))
        fix = "Set `name` of the entry in reward.functions to one of them, and add an entry for each that counts"
        raise ComponentFailed("reward_type", f"returned a dict of {shorten(known, 100)}, without {name!r}. {fix}")
    return values[name]


def _number(returned: Any) -> float:
    """A float of a number, or of a scalar of numpy or torch (zero dimensions and `.item()`)."""
    is_scalar = getattr(returned, "ndim", None) == 0 and hasattr(returned, "item")
    value = returned.item() if is_scalar else returned
    if not isinstance(value, numbers.Real):
        shown = shorten(repr(returned), 100)
        raise ComponentFailed("reward_type", f"returned {type(returned).__name__} {shown}, expected a number")
    try:
        return float(value)
    except OverflowError:
        raise ComponentFailed("reward_nan", "returned an integer too large for a float") from None


def _send(outgoing: BinaryIO, message: dict[str, Any]) -> None:
    outgoing.write(channel.pack(message))
    outgoing.flush()


if __name__ == "__main__":
    main()
