"""A run's recorded time as a Chrome trace, which https://ui.perfetto.dev and chrome://tracing open.

Format: "Trace Event Format" of Chromium: complete events (`X`) in microseconds. A process of the run is a process of
the trace, an activity a thread of it; what a span says beside its times (version, tokens) are the event's arguments.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from asyncrl.errors import UserError
from asyncrl.telemetry.timeline import LEARNER
from asyncrl_plugins.viewer.recorded_run.run import RecordedRun
from asyncrl_plugins.viewer.report.activity import parts_of_steps
from asyncrl_plugins.viewer.report.write import write_file


def write_trace(runs: Sequence[RecordedRun], target: Path) -> None:
    """Write the trace of all runs into one file. Raises UserError where they have recorded no time, or the file cannot
    be written."""
    spans = [(f"{run.path.name}: " if len(runs) > 1 else "", span) for run in runs for span in _spans(run)]
    if not spans:
        raise UserError("nothing has recorded its time in these runs: there is no timeline.jsonl, and no step")
    write_file(target, json.dumps({"traceEvents": list(_events(spans))}).encode(), "--trace")
    print(f"{target}  {len(spans):,} spans: open it at https://ui.perfetto.dev, which reads it in the browser")


def _spans(run: RecordedRun) -> Iterator[dict[str, Any]]:
    yield from run.spans
    for what, since, until in parts_of_steps(run):
        yield {"who": LEARNER, "what": what, "since": since, "until": until}


def _events(spans: Sequence[tuple[str, dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    began = min(span["since"] for _, span in spans)
    places: dict[str, dict[str, int]] = defaultdict(dict)
    for run, span in spans:
        activities = places[run + span["who"]]
        activities.setdefault(span["what"], len(activities) + 1)
    for process, (who, activities) in enumerate(places.items(), 1):
        yield {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": who}}
        for what, thread in activities.items():
            yield {"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": {"name": what}}
    numbers = {who: process for process, who in enumerate(places, 1)}
    for run, span in sorted(spans, key=lambda each: each[1]["since"]):
        told = {key: value for key, value in span.items() if key not in ("who", "what", "since", "until")}
        yield {
            "ph": "X",
            "name": span["what"],
            "pid": numbers[run + span["who"]],
            "tid": places[run + span["who"]][span["what"]],
            "ts": round(1e6 * (span["since"] - began)),
            "dur": round(1e6 * (span["until"] - span["since"])),
            "args": told,
        }
