"""Thinned curves, axes, and the lanes of the timeline."""

from __future__ import annotations

import json
import random
import re
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pytest

from asyncrl.telemetry.jsonl import read_lines
from asyncrl_plugins.viewer.panel.answers import Answers
from asyncrl_plugins.viewer.panel.run_snapshot import RunSnapshot
from asyncrl_plugins.viewer.report.activity import exclusive, lanes
from asyncrl_plugins.viewer.report.chart import MAX_POINTS, Curve, line_chart, thin
from asyncrl_plugins.viewer.report.charts import HELD_OUT_BY_VALUE, charts_of_run
from asyncrl_plugins.viewer.report.reading import read_run
from asyncrl_plugins.viewer.report.timeline import _labelled, timeline
from tests.rigs import made_up_run as made
from tests.rigs.tiny import ROOT


def test_thinning_keeps_the_extremes_the_ends_and_a_gap() -> None:
    rng = random.Random(1)
    points = [(float(i), rng.gauss(0, 1)) for i in range(10_000)]
    points[4321], points[7777] = (4321.0, 99.0), (7777.0, -99.0)
    with_gap = [*points[:5000], (5000.0, None), *points[5001:]]
    kept = thin(with_gap)
    assert len(kept) <= MAX_POINTS
    assert kept == sorted(kept, key=lambda point: point[0])
    for point in ((4321.0, 99.0), (7777.0, -99.0), (5000.0, None), with_gap[0], with_gap[-1]):
        assert point in kept
    assert thin(points[:MAX_POINTS]) == points[:MAX_POINTS]


@pytest.mark.parametrize("values", [[1.0], [0.0, 0.0], [-1e-300, 1e90], [5.0, 5.0, 5.0], [0.0, 1e-9, 1e9], [-3.0]])
def test_every_point_is_drawn_within_the_chart(values: list[float]) -> None:
    points = [(float(i), value) for i, value in enumerate(values)]
    drawn = line_chart("any", [Curve("c", points, "dots")], floor=0.0, limit=0.1)
    assert drawn
    assert line_chart("none", [Curve("c", [(1.0, None)])]) is None
    places = [points.split(",") for element, _, points in drawn["marks"] if element == "circle"]
    assert len(places) == len(values)
    assert all(0 <= float(x) <= 400 and 0 <= float(y) <= 168.1 for x, y in places), places


def test_activities_exclude_each_other() -> None:
    rng = random.Random(2)
    found = {name: [(t := rng.uniform(0, 100), t + rng.uniform(0, 5)) for _ in range(60)] for name in "abc"}
    parts = exclusive(found, "abc")
    everything = sorted(span for spans in parts.values() for span in spans)
    assert all(before[1] <= after[0] + 1e-9 for before, after in pairwise(everything))
    union = exclusive({"all": [span for spans in found.values() for span in spans]}, ["all"])["all"]
    total = sum(b - a for a, b in everything)
    assert total == pytest.approx(sum(b - a for a, b in union))


def seconds(spans: list[tuple[float, float]]) -> float:
    return sum(until - since for since, until in spans)


def test_lanes_say_who_did_what(tmp_path: Path) -> None:
    learner, server = lanes(read_run(made.make_run(tmp_path / "run", steps=10)))
    assert (learner.name, server.name) == ("learner", "host-1")
    assert {what: round(seconds(spans), 3) for what, spans in learner.parts.items() if spans} == {
        "waiting": 20.0,
        "learning": 60.0,
        "publishing": 10.0,
        "saving": 3.0,
    }
    assert seconds(server.parts["generating"]) == pytest.approx(60.0)
    assert seconds(server.parts["waiting"]) == pytest.approx(40.0)


def test_a_pause_between_two_learners_is_drawn_short(tmp_path: Path) -> None:
    away = 86_400.0
    run = made.make_run(tmp_path / "run", change=lambda n: {"time": made.BEGAN + 10 * n + (away if n > 20 else 0)})
    made.lines(run / "timeline.jsonl", [])
    starts = [{"time": made.BEGAN, "step": 0}, {"time": made.BEGAN + away + 200, "step": 20}]
    (run / "environment.json").write_text(json.dumps({"starts": starts}))
    drawn = timeline(read_run(run))
    assert [[length for _, length in picture["pauses"]] for picture in drawn["pictures"]] == [["24 h 00 min"]] * 2
    widths = [right - left for what, left, right, _ in drawn["pictures"][1]["marks"][0] if what == "learning"]
    assert len(widths) == 20
    assert min(widths) > 20


def test_time_in_which_no_learner_ran_does_not_count(tmp_path: Path) -> None:
    """Twenty steps of 10 s, a pause of 200 s, twenty more."""

    def times(number: int) -> dict[str, float]:
        at = made.BEGAN + 10 * number + (200 if number > 20 else 0)
        return {"time": at, "uptime_s": 10 * ((number - 1) % 20 + 1)}

    run = made.make_run(tmp_path / "run", steps=40, change=times)
    assert read_run(run).busy_s == pytest.approx(400)
    snapshot = RunSnapshot(run)
    snapshot.refresh()
    assert snapshot.seconds_taken() == pytest.approx(400), "asyncrl watch says the same"


def test_labels_of_steps_do_not_stand_on_each_other_and_activities_do_not_look_alike() -> None:
    ends = [(200.0, "998"), (210.0, "999"), (240.0, "1000"), (272.0, "1001")]
    assert _labelled(ends) == [(200.0, "998"), (210.0, ""), (240.0, "1000"), (272.0, "1001")]
    css = (ROOT / "asyncrl_plugins" / "viewer" / "report" / "report.css").read_text()
    names = set(re.findall(r"\.a-[\w-]+ \{ --c: var\(--(\w+)\)", css))
    assert {"wait", "sleep", "score"} <= names
    for theme in zip(*(re.findall(rf"--{name}: #(\w{{6}})", css) for name in sorted(names)), strict=True):
        colours = [np.array(list(bytes.fromhex(colour)), float) for colour in theme]
        nearest = min(float(np.linalg.norm(a - b)) for a, b in combinations(colours, 2))
        assert nearest > 40, "of at most 441"


def test_scores_of_each_value_have_a_curve_and_stand_in_the_panel(tmp_path: Path) -> None:
    run = made.make_run(tmp_path / "run", accuracy=(0.5, 0.6))
    records = read_lines(run / "evaluations.jsonl")
    parts = [{"accuracy/kind=sum": 0.9, "accuracy/kind=read": step / 10} for step in range(2)]
    made.lines(run / "evaluations.jsonl", [record | part for record, part in zip(records, parts, strict=True)])
    (drawn,) = [each for each in charts_of_run(read_run(run))[0][1] if each["title"] == HELD_OUT_BY_VALUE]
    assert [curve.name for curve, _ in drawn["keys"]] == ["kind=read", "kind=sum"]
    panel = RunSnapshot(run)
    panel.refresh()
    rows = {row.name: str(row.lines[0]) for row in Answers(panel, 80, 1).learning()}
    assert rows["by value"] == "kind=read 0.100, kind=sum 0.900"
