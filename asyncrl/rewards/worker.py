"""The worker process: `python -m asyncrl.rewards.worker`, started by `process_scorer.py` only.

Loads every configured function once, then answers one request after another.

setup    {"components": [{"name", "function", "kwargs", "path", "package", "source", "group", "shapes"}]}
request  {"row", "completions", "scores", "components"}: fields that the samples share and those of each, the score of
         each so far, names of the wanted components
begun    each component by its name, by which a killed worker's culprit is named
reply    {"seconds", "scores", "is_last"}, of a plug-in's scorer also {"counts"}; `is_last`: the worker ends after it
"""

from __future__ import annotations

import math
import numbers
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from asyncrl.config.secrets import with_secrets
from asyncrl.rewards.sample import RewardSample
from asyncrl.rewards.score import Score, samples_of, scores_of
from asyncrl.rewards.spec import call_reward, check_call, load_reward
from asyncrl.user_functions import function_of, load_module, one_line, shorten
from asyncrl.workers.channel import Channel, Serve, over_limit, run_worker


@dataclass(frozen=True)
class Component:
    name: str
    function: Callable[..., Any]
    kwargs: dict[str, Any]
    file: str
    """The user's file, for naming lines in it; empty for a built-in."""
    group: bool
    """True if the function is called once with all samples of a request."""
    shapes: dict[str, float]
    """Weighted components whose sum it gets as `score`; empty where it gets none."""


@dataclass
class Row:
    """One completion while it is scored."""

    sample: RewardSample
    score: Score
    dicts: list[tuple[Component, Mapping[str, Any]]] = field(default_factory=list)
    """Dicts that functions returned, each with the component that it was called for."""

    def score_for(self, component: Component) -> float | None:
        """The sum that the component shapes; None where this completion has failed."""
        known = self.score.components
        return None if self.score.error_kind else sum(weight * known[name] for name, weight in component.shapes.items())

    def known_dict(self, component: Component) -> Mapping[str, Any] | None:
        """The dict that the same function with the same arguments has returned for this completion, if any."""
        call = (component.function, component.kwargs, component.shapes)
        known = (values for other, values in self.dicts if (other.function, other.kwargs, other.shapes) == call)
        return next(known, None)

    def fail(self, component: Component, failed: ComponentFailed) -> None:
        self.score = self.score.failed(failed.kind, f"reward component {component.name!r}: {failed}")


class ComponentFailed(Exception):
    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def _load(setup: dict[str, Any]) -> tuple[dict[str, Any], Serve]:
    modules: dict[str, ModuleType] = {}  # two functions of one file share its globals
    components: dict[str, Component] = {}
    for entry in setup["components"]:
        path = entry["path"]
        if not path:
            function = load_reward(entry["function"])
        else:
            if path not in modules:
                modules[path] = load_module(Path(path), entry["source"], entry["package"])
            function = function_of(modules[path], entry["function"])
        check_call(function, entry["function"], entry["kwargs"], shapes=bool(entry["shapes"]))
        name, kwargs = entry["name"], with_secrets(entry["kwargs"], f"reward {entry['name']}: kwargs")
        components[name] = Component(name, function, kwargs, path, entry["group"], entry["shapes"])
    return {}, partial(_serve, components)


def _serve(components: dict[str, Component], channel: Channel) -> None:
    for request in channel:
        reply = _score(request, components, channel)
        channel.send(reply)
        if reply["is_last"]:
            return


def _score(request: dict[str, Any], components: dict[str, Component], channel: Channel) -> dict[str, Any]:
    rows = list(map(Row, samples_of(request), scores_of(request)))
    started = time.perf_counter()
    for name in request["components"]:
        if all(row.score.error_kind for row in rows):
            break
        channel.send({"begun": request["id"], "part": name})
        if components[name].group:
            _run(components[name], rows)
            continue
        for row in rows:
            if not row.score.error_kind:
                _run(components[name], [row])
    seconds, scores = time.perf_counter() - started, [vars(row.score) for row in rows]
    # What filled the memory may still be held: this worker ends, and a fresh one is started.
    is_last = any(row.score.error_kind == "reward_memory" for row in rows)
    return {"id": request["id"], "seconds": seconds, "scores": scores, "is_last": is_last}


def _run(component: Component, rows: Sequence[Row]) -> None:
    """One call for some rows; where it fails, it fails all of them. A row's own number may be bad by itself.

    A function that returns a dict is called once for all its components.
    """
    samples = [row.sample for row in rows]
    scores = [row.score_for(component) for row in rows] if component.shapes else None
    returned: Sequence[Any] = [row.known_dict(component) for row in rows]
    try:
        if None in returned:
            with _user_code(component, samples):
                returned = call_reward(component.function, samples, component.kwargs, scores, group=component.group)
    except ComponentFailed as failed:
        for row in rows:
            row.fail(component, failed)
        return
    for row, value in zip(rows, returned, strict=True):
        try:
            row.score = row.score.plus(component.name, _finite(component, row, value))
        except ComponentFailed as failed:
            row.fail(component, failed)


@contextmanager
def _user_code(component: Component, samples: Sequence[RewardSample]) -> Iterator[None]:
    """Raises ComponentFailed in place of whatever user code raises."""
    # A reward that draws random numbers must not depend on which worker scored what before.
    texts = "\0".join(sample.completion for sample in samples)
    random.seed(f"{samples[0].row_id}\0{texts}".encode("utf-8", "surrogatepass"))
    try:
        yield
    except ComponentFailed:
        raise
    except MemoryError as error:
        raise ComponentFailed("reward_memory", over_limit("reward", error, component.file)) from None
    except BaseException as error:  # also SystemExit: user code must not decide about this process
        raise ComponentFailed("reward_exception", one_line(error, component.file)) from None


def _finite(component: Component, row: Row, returned: Any) -> float:
    """The number that was returned for a row, by itself or in a dict. Raises ComponentFailed."""
    with _user_code(component, [row.sample]):  # the object's own methods
        if isinstance(returned, Mapping):
            row.dicts.append((component, returned))
            returned = _of_name(returned, component.name)
        value = _number(returned)
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


if __name__ == "__main__":
    run_worker(_load)
