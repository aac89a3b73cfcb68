"""A chat template that writes today's date writes one day in a run, whatever the clocks of its processes say."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.config.load import load_config
from asyncrl.config.schema import RunConfig
from asyncrl.demo.model import CHAT_TEMPLATE
from tests.rigs.small_runs import logs, small
from tests.rigs.two_processes import start, with_ports, write_config


def clock_says(day: str) -> str:
    """Code after which a template would take this day for today."""
    return (
        "from datetime import date\nfrom asyncrl.processing import chat_template\n"
        f"class Clock(date):\n    today = classmethod(lambda cls: date.fromisoformat({day!r}))\n"
        "chat_template.date = Clock\n"
    )


@pytest.mark.slow
def test_a_run_goes_on_at_another_day_with_a_server_in_another_time_zone(
    make_config: Callable[..., RunConfig], tiny_model: Path, tmp_path: Path
) -> None:
    shutil.copytree(tiny_model, tmp_path / "model")
    dated = "{{ strftime_now('Today: %d %b %Y\n') }}" + CHAT_TEMPLATE
    (tmp_path / "model" / "chat_template.jinja").write_text(dated)
    files = {day: tmp_path / f"{day}.py" for day in ("2026-11-27", "2026-11-28", "2026-12-01")}
    for day, file in files.items():
        file.write_text(clock_says(day))
    config = small(
        make_config,
        model={"path": str(tmp_path / "model")},
        rollout={"engine": "scripted"},
        trainer={"max_steps": 2, "save_freq": 0},
        network={"timeout_s": 5.0},
    )
    file = write_config(with_ports(config), tmp_path / "services")
    server = start("rollout_server", file, first=str(files["2026-11-27"]))
    try:
        first = start("learner", file, first=str(files["2026-11-28"]), crash_at="step.consumed:2")
        assert first.wait(timeout=120) == -9, logs(tmp_path / "services")
        again = start("learner", file, "--resume", first=str(files["2026-12-01"]))
        assert again.wait(timeout=120) == 0, logs(tmp_path / "services")
        assert server.wait(timeout=60) == 0, logs(tmp_path / "services")
    finally:
        server.kill()
    kept = load_config(config.run_path / "config.yaml")
    assert kept.model.template_date == "2026-11-28", "for a replay, too"
