"""The report in a real browser, offline: it draws, decodes, tells and prints without a complaint."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from asyncrl_plugins.viewer.report.write import write_report
from tests.rigs import made_up_run as made

pytestmark = pytest.mark.slow


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Any]:
    """Opens a file, offline; at the end nothing may have been complained about or asked for."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, offline=True)
    page = context.new_page()
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on(
        "request", lambda request: complaints.append(request.url) if request.url[:5] not in ("file:", "data:") else 0
    )

    def open_file(file: Path) -> Any:
        page.goto(file.resolve().as_uri())
        return page

    yield open_file
    context.close()
    assert [said for said in complaints if not said.startswith(("file:", "data:image/"))] == []


def report(folder: Path) -> Path:
    rough = lambda n: {"entropy": 0.2 + 0.01 * n, "rows/truncated": float(n % 3)}  # noqa: E731
    return write_report([made.make_run(folder / "run", steps=100, change=rough)])


def test_charts_are_drawn_within_their_frames(opened: Any, tmp_path: Path) -> None:
    page = opened(report(tmp_path))
    figures = page.locator("figure.chart svg")
    assert figures.count() > 15
    outside = page.evaluate(
        """() => [...document.querySelectorAll("figure.chart")].filter((figure) => {
          const frame = figure.getBoundingClientRect();
          return [...figure.querySelectorAll("polyline, polygon, circle")].some((mark) => {
            const box = mark.getBoundingClientRect();
            return box.left < frame.left || box.right > frame.right || box.top < frame.top || box.bottom > frame.bottom;
          });
        }).length"""
    )
    assert outside == 0


def test_a_curve_tells_its_values_and_all_cursors_stand_at_the_step(opened: Any, tmp_path: Path) -> None:
    page = opened(report(tmp_path))
    chart = page.locator("figure.chart", has_text="Entropy").locator("svg")
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + box["height"] * 0.5)
    told = page.locator("#tip").inner_text()
    step = int(re.match(r"step (\d+)\n", told)[1])  # type: ignore[index]
    assert 50 < step < 65
    assert f"entropy  {round(0.2 + 0.01 * step, 5):g}" in told
    shown = page.evaluate(
        """() => [...document.querySelectorAll("figure.chart .cursor")]
          .filter((line) => getComputedStyle(line).visibility === "visible").length"""
    )
    assert shown == page.locator("figure.chart").count()
    page.mouse.move(2, 2)
    assert page.locator("#tip").is_hidden()


def test_the_timeline_tells_who_did_what(opened: Any, tmp_path: Path) -> None:
    page = opened(report(tmp_path))
    overview, detail = page.locator("svg.overview"), page.locator("svg.detail")
    overview.scroll_into_view_if_needed()
    box = overview.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 14)
    told = page.locator("#tip").inner_text()
    assert re.match(r"learner, step \d+\n", told)
    assert re.search(r"learning  \d+ %", told)
    detail.locator("rect.a-generating").first.hover()
    assert page.locator("#tip").inner_text() == "generating 6 s"


def test_labels_of_the_timeline_keep_their_places(opened: Any, tmp_path: Path) -> None:
    """A standstill of 83 minutes in the middle of short steps."""
    away = 5000.0
    run = made.make_run(tmp_path / "run", change=lambda n: {"time": made.BEGAN + 10 * n + (away if n > 20 else 0)})
    spans = [made.span("host-1", "generating", since, since + 200) for since in (0, away + 200)]
    made.lines(run / "timeline.jsonl", spans)
    starts = [{"time": made.BEGAN, "step": 0}, {"time": made.BEGAN + away + 200, "step": 20}]
    (run / "environment.json").write_text(json.dumps({"starts": starts}))
    page = opened(write_report([run]))
    for picture in page.locator("svg.lanes").all():
        boxes = [(text.text_content(), text.bounding_box()) for text in picture.locator("text").all()]
        boxes = [(name, box) for name, box in boxes if name]
        drawn = picture.bounding_box()
        lanes_end = drawn["y"] + 74 * drawn["width"] / 1180  # two of 30, with 10 between them, after 4
        (stopped,) = [box for name, box in boxes if name.endswith("1 h 23 min")]
        assert drawn["y"] <= stopped["y"]
        assert stopped["y"] + stopped["height"] <= lanes_end
        for (one, a), (other, b) in combinations(boxes, 2):
            apart = a["x"] + a["width"] <= b["x"] or b["x"] + b["width"] <= a["x"]
            below = a["y"] + a["height"] <= b["y"] + 1 or b["y"] + b["height"] <= a["y"] + 1
            assert apart or below, f"{one} and {other}"


def test_samples_are_filtered_by_why_they_are_shown(opened: Any, tmp_path: Path) -> None:
    page = opened(report(tmp_path))
    everything = page.locator(".card:visible").count()
    page.get_by_role("button", name="error", exact=True).click()
    assert 0 < page.locator(".card:visible").count() < everything
    assert "KeyError: 'x'" in page.locator(".card:visible").inner_text()
    page.get_by_role("button", name="all", exact=True).click()
    assert page.locator(".card:visible").count() == everything


def test_conversations_are_filtered_by_their_end_and_by_one_of_their_calls(opened: Any, tmp_path: Path) -> None:
    run = made.make_run(tmp_path / "run")
    digest = made.image(run, colour="teal")

    def talk(text: str, end: str, *calls: tuple[str, str]) -> dict[str, Any]:
        called = [{"name": name, "arguments": "{}", "error_kind": kind, "error": kind} for name, kind in calls]
        shown = [{"role": "tool", "parts": ["seen", {"image": digest}]}]
        turn = {"text": text, "reward": 0.5, "versions": [1], "calls": called, "info": "", "shown": shown}
        return made.completion(text, 1.0) | {"turns": [turn], "end": end}

    first = [
        talk("wrong crop", "turns", ("crop", "arguments")),
        talk("right crop", "done", ("crop", ""), ("look", "tool")),
        *(talk(f"nothing {number}", "done") for number in range(4)),
    ]
    made.lines(run / "samples.jsonl", [made.sample(1, [], *first), made.sample(40, [], made.completion("once", 0.0))])
    page = opened(write_report([run]))
    assert page.locator(".turn img").first.evaluate("image => image.naturalWidth") == 40

    def shown(**chosen: str) -> list[str]:
        for name in ("end", "tool", "error"):
            page.select_option(f"[data-chat={name}]", chosen.get(name, ""))
        return page.locator(".completion:visible .turn .wrote").all_inner_texts()

    assert page.locator(".card:visible").count() == 2
    assert shown(end="turns") == ["wrong crop"]
    assert page.locator(".card:visible").count() == 1, "a completion of one turn has no end"
    assert shown(end="done") == ["right crop", *(f"nothing {number}" for number in range(4))], "folded ones, too"
    assert shown(tool="crop") == ["wrong crop", "right crop"]
    assert shown(tool="crop", error="*") == ["wrong crop"], "the other's mistake was another call"
    assert shown(error="tool") == ["right crop"]
    assert shown(end="turns", error="tool") == []
    shown()
    assert page.locator(".card:visible").count() == 2
    page.get_by_role("button", name="wrong call", exact=True).click()
    assert page.locator(".card:visible").count() == 1


def test_it_fits_a_narrow_window_and_a_printed_page(opened: Any, tmp_path: Path) -> None:
    page = opened(report(tmp_path))
    page.set_viewport_size({"width": 420, "height": 800})
    assert page.evaluate("() => document.documentElement.scrollWidth") <= 420
    pdf = page.pdf(format="A4")
    assert pdf.startswith(b"%PDF")
    assert 2 <= len(re.findall(rb"/Type /Page\b", pdf)) <= 15


def test_a_comparison_and_an_empty_run_open_too(opened: Any, tmp_path: Path) -> None:
    first, second = made.make_run(tmp_path / "a"), made.make_run(tmp_path / "b", steps=12)
    page = opened(write_report([first, second], tmp_path / "both.html"))
    assert page.locator("figure.chart svg").count() > 10
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "status.json").touch()
    page = opened(write_report([tmp_path / "empty"]))
    assert "nothing to judge" in page.locator(".verdict").inner_text()
