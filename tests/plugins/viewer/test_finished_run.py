"""`asyncrl inspect` and `asyncrl report` on what real runs have left."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.schema import RunConfig
from asyncrl.telemetry.host_versions import read_starts
from asyncrl_plugins.viewer.report.activity import Lane, lanes
from asyncrl_plugins.viewer.report.reading import read_run
from asyncrl_plugins.viewer.report.write import write_report
from tests.rigs.small_runs import logs
from tests.rigs.two_processes import run_both, start_command
from tests.rigs.waiting import wait_until

pytestmark = pytest.mark.slow


@pytest.fixture
def inspect(finished_run: Path, tmp_path: Path) -> Callable[..., str]:
    """Runs `asyncrl inspect RUN WORDS`; returns what it printed."""

    def run(*words: str) -> str:
        log = tmp_path / "inspect.log"
        code = start_command("inspect", str(finished_run), *words, log=log).wait(timeout=60)
        assert code == 0, log.read_text()
        return log.read_text()

    return run


def test_every_sample_can_be_looked_at(finished_run: Path, inspect: Callable[..., str], tmp_path: Path) -> None:
    rows = [json.loads(line) for line in inspect("--json", "--limit", "100").splitlines()]
    assert len(rows) == 5 * 4 * 4, "steps, prompts per step, group size"
    assert all(row["completion"] and row["advantage"] is not None and row["has_payload"] for row in rows)
    printed = inspect("--json", "--step", "1", "--order", "worst")
    of_step = [json.loads(line) for line in printed.splitlines()]
    assert [row["reward"] for row in of_step] == sorted(row["reward"] for row in rows if row["step"] == 1)

    ticket = of_step[0]["ticket_id"]
    shown = inspect("--ticket", str(ticket), "--colour", "version")
    assert "versions 0 (tokens 1 to" in shown
    assert "PNG" in shown
    group = json.loads(inspect("--ticket", str(ticket), "--json"))
    for one in group["trajectories"]:
        assert len(one["learner_logprobs"]) == one["length"]
        gaps = [abs(a - b) for a, b in zip(one["learner_logprobs"], one["logprobs"], strict=True)]
        assert max(gaps) < 1e-3, "on-policy: both sides agree"
        assert one["levels"]["diff"] == "0" * one["length"]

    log = tmp_path / "web.log"
    serving = start_command("inspect", str(finished_run), "--web", "0", "--order", "worst", log=log)
    try:
        wait_until(lambda: log.exists() and log.read_text().endswith("\n"), "the page's address")
        check_page(log.read_text(), group)
        serving.terminate()
        assert serving.wait(timeout=20) == 0
    finally:
        serving.kill()


def check_page(printed: str, group: dict[str, Any]) -> None:
    def fetch(path: str) -> tuple[str, bytes]:
        with urllib.request.urlopen(f"{address[1]}{path}", timeout=20) as answer:
            return answer.headers["Content-Type"], answer.read()

    address = re.match(r"(http://127\.0\.0\.1:\d+/)\?order=worst ", printed)
    assert address is not None
    assert fetch("")[0].startswith("text/html")
    assert json.loads(fetch(f"api/sample/{group['ticket_id']}")[1]) == group
    kind, image = fetch(f"image/{group['images'][0]['hash']}?ticket={group['ticket_id']}")
    assert (kind, len(image)) == ("image/png", group["images"][0]["bytes"])


def seconds(lane: Lane) -> dict[str, float]:
    return {what: sum(b - a for a, b in spans) for what, spans in lane.parts.items()}


def test_a_report_shows_who_did_what_and_on_what(finished_run: Path, tmp_path: Path) -> None:
    run = read_run(finished_run)
    assert run.missing == []
    (start,) = read_starts(finished_run)
    assert start["step"] == 0
    learner, server = lanes(run)
    spent, at_work = seconds(learner), seconds(server)
    assert all(spent[what] > 0 for what in ("learning", "publishing", "waiting", "saving")), spent
    # A checkpoint may be written during a whole evaluation, and the lane shows that the learner saves.
    assert {"evaluating"} < {span["what"] for span in run.spans if span["who"] == "learner"}
    loaded = {span["version"] for span in run.spans if span["what"] == "loading"}
    assert loaded
    assert loaded <= set(range(6))
    assert at_work["generating"] > 0
    # Every token that was sampled is in one of the server's spans, and heartbeats come until the end.
    tokens = sum(span["tokens"] for span in run.spans if span["what"] == "usage")
    assert tokens >= sum(run.values("tokens"))
    page = write_report([finished_run], tmp_path / "report.html").read_text()
    assert server.name in page
    assert all(e["seconds"] >= e["waited_s"] >= 0 for e in run.evaluations)
    assert "2 evaluations; the learner waited" in page
    assert start["packages"]["torch"] in page


def test_in_sync_mode_the_turns_are_recorded(make_config: Callable[..., RunConfig], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    config = make_config(trainer={"mode": "sync", "max_steps": 3, "samples_per_step": 1}, data={"val_files": []})
    assert run_both(config, folder) == (0, 0), logs(folder)
    run = read_run(folder)
    learner, server, device = lanes(run)
    asleep = sum(run.values("asleep_s/learner"))
    assert seconds(learner)["asleep"] == pytest.approx(asleep, rel=0.3, abs=0.2)
    work = sorted([*learner.parts["learning"], *server.parts["generating"]])
    assert all(before[1] <= after[0] + 0.05 for before, after in pairwise(work)), "both at work: " + json.dumps(work)
    assert all(seconds(device)[turn] > 0 for turn in ("server's turn", "learner's turn", "handing over"))
