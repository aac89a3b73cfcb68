"""Sort recorded time into lanes, one per process, of activities that exclude each other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from asyncrl.telemetry.timeline import LEARNER, merge
from asyncrl_plugins.viewer.recorded_run.run import RecordedRun, number

Spans = list[tuple[float, float]]

LEARNER_ACTIVITIES = ("saving", "evaluating", "learning", "publishing", "asleep", "waiting")
SERVER_ACTIVITIES = ("waking", "loading", "generating", "scoring", "asleep", "waiting")
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
    recorded: dict[str, dict[str, Spans]] = defaultdict(lambda: defaultdict(list))
    for span in run.spans:
        recorded[span["who"]][span["what"]].append((span["since"], span["until"]))
    learner = recorded.pop(LEARNER, defaultdict(list))
    for what, since, until in parts_of_steps(run):
        learner[what].append((since, until))
    lanes = [Lane(LEARNER, exclusive(learner, LEARNER_ACTIVITIES))]
    handed_over: Spans = []
    turns = merge(learner["asleep"]) if run.setting("trainer.mode") == "sync" else []
    for name, server in recorded.items():
        server["waiting"] = merge(server.pop("usage", []), USAGE_GAP_S)
        if run.setting("trainer.mode") == "sync":
            server["asleep"] = exclusive({"awake": turns, "asleep": server["waiting"]}, ("awake", "asleep"))["asleep"]
            server["waking"] = [*_wakings(run, name, turns), *server.pop("falling asleep", [])]
            handed_over += server["waking"]
        lanes.append(Lane(name, exclusive(server, SERVER_ACTIVITIES)))
    if turns:
        handed_over += [(since, until) for what, since, until in parts_of_steps(run) if what == "waking"]
        everything = merge([span for spans in learner.values() for span in spans], USAGE_GAP_S)
        device = {"handing over": handed_over, "server's turn": turns, "learner's turn": everything}
        lanes.append(Lane("device", exclusive(device, DEVICE_TURNS)))
    return [lane for lane in lanes if any(lane.parts.values())]


def parts_of_steps(run: RecordedRun) -> Iterable[tuple[str, float, float]]:
    """Divide each step, backwards from the time of its record. The learner wakes up before it learns."""
    for step in run.steps:
        at = number(step.get("time"))
        for what, key in (("publishing", "publish_s"), ("learning", "learn_s"), ("waiting", "wait_s")):
            seconds = number(step.get(key))
            if at is None or seconds is None:
                break
            if what == "waiting" and (waking_s := number(step.get("wake_s/learner"))):
                yield "waking", at - waking_s, at
            yield what, at - seconds, at
            at -= seconds


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


def exclusive(activities: Mapping[str, Spans], order: Sequence[str]) -> dict[str, Spans]:
    """Give each moment to the first activity in `order` that has it."""
    merged = {what: merge(activities.get(what, [])) for what in order}
    edges = np.unique([edge for spans in merged.values() for span in spans for edge in span])
    middles = (edges[1:] + edges[:-1]) / 2
    is_free = np.ones(len(middles), dtype=bool)
    parts: dict[str, Spans] = {}
    for what, spans in merged.items():
        # Inside a span an odd number of its activity's edges lies before.
        is_inside = np.searchsorted(np.ravel(spans), middles) % 2 == 1
        mine = np.flatnonzero(is_inside & is_free)
        parts[what] = merge(zip(edges[mine].tolist(), edges[mine + 1].tolist(), strict=True))
        is_free &= ~is_inside
    return parts


def clip(spans: Spans, since: float, until: float) -> Spans:
    return [(max(a, since), min(b, until)) for a, b in spans if b > since and a < until]
