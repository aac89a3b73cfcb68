"""Sort recorded time into lanes, one per process, of activities that exclude each other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from asyncrl.telemetry.timeline import LEARNER, merge
from asyncrl.tools.recorded_run import RecordedRun, number

Spans = list[tuple[float, float]]

LEARNER_ACTIVITIES = ("saving", "evaluating", "learning", "publishing", "asleep", "waiting")
SERVER_ACTIVITIES = ("waking", "loading", "generating", "scoring", "asleep", "idle")
DEVICE_TURNS = ("handing over", "server's turn", "learner's turn")
"""Activities of each lane. Where two overlap, the one named first is shown."""
USAGE_GAP_S = 5.0
"""Gaps between spans of use that are closed: heartbeats are late by up to their interval."""


@dataclass(frozen=True)
class Lane:
    name: str
    parts: dict[str, Spans]
    """Spans by activity; none overlaps another."""


def lanes(run: RecordedRun) -> list[Lane]:
    """Return lanes of the learner, each rollout server and, where they take turns, the device."""
    recorded: dict[tuple[str, str], Spans] = defaultdict(list)
    for span in run.spans:
        recorded[span["who"], span["what"]].append((span["since"], span["until"]))
    learner = {what: list(spans) for (who, what), spans in recorded.items() if who == LEARNER}
    for what, spans in _steps(run).items():
        learner.setdefault(what, []).extend(spans)
    lanes = [Lane(LEARNER, exclusive(learner, LEARNER_ACTIVITIES))]
    servers = list(dict.fromkeys(who for who, _ in recorded if who != LEARNER))
    shared = run.setting("trainer.mode") == "sync"
    asleep = learner.get("asleep", [])
    lanes += [Lane(name, _server(run, name, recorded, asleep if shared else None)) for name in servers]
    if shared and asleep:
        lanes.append(Lane("device", _device(run, learner, asleep, servers)))
    return [lane for lane in lanes if any(lane.parts.values())]


def _steps(run: RecordedRun) -> dict[str, Spans]:
    """Divide each step, backwards from the time of its record."""
    spans: dict[str, Spans] = {"waiting": [], "learning": [], "publishing": []}
    for step in run.steps:
        at = number(step.get("time"))
        for what, key in (("publishing", "publish_s"), ("learning", "learn_s"), ("waiting", "wait_s")):
            seconds = number(step.get(key))
            if at is None or seconds is None:
                break
            spans[what].append((at - seconds, at))
            at -= seconds
    return spans


def _server(
    run: RecordedRun, name: str, recorded: Mapping[tuple[str, str], Spans], learner_asleep: Spans | None
) -> dict[str, Spans]:
    own = {what: list(spans) for (who, what), spans in recorded.items() if who == name}
    present = merge(own.pop("usage", []), USAGE_GAP_S)
    own["idle"] = present
    if learner_asleep is not None:
        own["asleep"] = subtract(present, merge(learner_asleep))
        own["waking"] = [*_wakings(run, name, learner_asleep), *own.pop("falling asleep", [])]
    return exclusive(own, SERVER_ACTIVITIES)


def _wakings(run: RecordedRun, name: str, turns: Spans) -> Spans:
    """Return the time that a server took to wake, at the beginning of each of its turns."""
    wakings = []
    for span in run.spans:
        if span["who"] == name and span["what"] == "falling asleep":
            seconds, at = number(span.get("wake_s")) or 0.0, span["since"]
            turn = next((began for began, ended in turns if began <= at <= ended + USAGE_GAP_S), None)
            if turn is not None:
                wakings.append((turn, min(turn + seconds, at)))
    return wakings


def _device(run: RecordedRun, learner: Mapping[str, Spans], asleep: Spans, servers: Sequence[str]) -> dict[str, Spans]:
    everything = merge([span for spans in learner.values() for span in spans], USAGE_GAP_S)
    moving = [span for name in servers for span in _wakings(run, name, asleep)]
    moving += [(s["since"], s["until"]) for s in run.spans if s["what"] == "falling asleep"]
    for step in run.steps:
        at, seconds = number(step.get("time")), number(step.get("wake_s/learner"))
        worked = sum(number(step.get(key)) or 0.0 for key in ("learn_s", "publish_s"))
        if at is not None and seconds:
            moving.append((at - worked - seconds, at - worked))
    turns = {"learner's turn": subtract(everything, merge(asleep)), "server's turn": asleep, "handing over": moving}
    return exclusive(turns, DEVICE_TURNS)


def exclusive(activities: Mapping[str, Iterable[tuple[float, float]]], order: Sequence[str]) -> dict[str, Spans]:
    """Give each moment to the first activity in `order` that has it."""
    covered: Spans = []
    parts: dict[str, Spans] = {}
    for what in order:
        spans = merge(list(activities.get(what, [])))
        parts[what] = subtract(spans, covered)
        covered = merge([*covered, *spans])
    return parts


def subtract(spans: Spans, covered: Spans) -> Spans:
    """Return the parts of `spans` that are not covered; both are in order and without overlaps."""
    left: Spans = []
    i = 0
    for since, until in spans:
        while i < len(covered) and covered[i][1] <= since:
            i += 1
        at, j = since, i
        while j < len(covered) and covered[j][0] < until:
            if covered[j][0] > at:
                left.append((at, covered[j][0]))
            at = max(at, covered[j][1])
            j += 1
        if at < until:
            left.append((at, until))
    return left


def clip(spans: Spans, since: float, until: float) -> Spans:
    return [(max(a, since), min(b, until)) for a, b in spans if b > since and a < until]
