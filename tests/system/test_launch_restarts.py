"""What crashes is started again, so often and no more; what would fail again is not. Small scripts stand in."""

from __future__ import annotations

import io
import itertools
import json
import signal
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from asyncrl.launch.processes import Service
from asyncrl.launch.supervisor import LONGEST_DELAY_S, Outcome, RestartPolicy, Supervisor
from asyncrl.tools.panel.display import Display
from asyncrl.tools.panel.run_snapshot import RunSnapshot

QUICK = RestartPolicy(max_restarts=3, delay_s=0.05)
COUNT = """
    import os, signal, sys, time
    path = sys.argv[1]
    open(path, "a").write(" ".join(sys.argv[2:]) + "\\n")
    starts = len(open(path).readlines())
"""
"""How often the stand-in has been started, and with which arguments."""

Make = Callable[..., Service]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def make(name: str, script: str, again: tuple[str, ...] = ()) -> Service:
        code = textwrap.dedent(COUNT) + textwrap.dedent(script)
        command = [sys.executable, "-c", code, str(tmp_path / f"{name}.starts")]
        return Service(name, command, tmp_path / "logs" / f"{name}.log", {}, lambda: again)

    return make


def starts(tmp_path: Path, name: str) -> list[str]:
    return (tmp_path / f"{name}.starts").read_text().splitlines()


def run(*services: Service, policy: RestartPolicy = QUICK) -> tuple[Outcome, list[str], dict[str, int]]:
    told: list[str] = []
    supervisor = Supervisor(*services, policy=policy, tell=told.append, stop_s=0.5)
    outcome = supervisor.run()
    assert all(service.code is not None for service in services), "nothing is left behind"
    return outcome, told, dict(supervisor.restarts)


def until_starts(path: Path, name: str, count: int) -> str:
    """Waits for another stand-in to have been started so often."""
    return f"""
        other = {str(path / name)!r} + ".starts"
        while not os.path.exists(other) or len(open(other).readlines()) < {count}: time.sleep(0.02)
    """


STAY = "time.sleep(60)"


@pytest.mark.parametrize("ending", ["sys.exit(1)", "os.kill(os.getpid(), signal.SIGKILL)", "raise OSError('gone')"])
def test_a_learner_that_crashes_is_resumed_and_its_server_stays(make: Make, tmp_path: Path, ending: str) -> None:
    learner = make("learner", f"if starts < 3:\n    {ending}", again=("--resume",))
    outcome, told, restarts = run(learner, make("rollout_server", STAY))
    assert outcome == Outcome(0)
    assert starts(tmp_path, "learner") == ["", "--resume", "--resume"]
    assert len(starts(tmp_path, "rollout_server")) == 1
    assert restarts == {"learner": 2}
    assert [line.split("; ")[1] for line in told] == ["restart 1 of 3 in 0.05 s", "restart 2 of 3 in 0.1 s"]
    assert told[0].startswith("learner ")
    assert learner.log.read_text().count("it is started again") == 2


def test_each_server_is_restarted_on_its_own(make: Make, tmp_path: Path) -> None:
    crash_once = f"if starts == 1:\n    sys.exit(1)\n{STAY}"
    servers = [make("server-1", STAY), make("server-2", crash_once), make("server-3", crash_once)]
    waits = until_starts(tmp_path, "server-2", 2) + until_starts(tmp_path, "server-3", 2)
    outcome, _, restarts = run(make("learner", waits), *servers)
    assert outcome == Outcome(0)
    assert restarts == {"server-2": 1, "server-3": 1}


@pytest.mark.parametrize("failing", ["learner", "rollout_server"])
def test_after_the_last_restart_the_run_ends(make: Make, tmp_path: Path, failing: str) -> None:
    sides = {name: make(name, "sys.exit(1)" if name == failing else STAY) for name in ("learner", "rollout_server")}
    outcome, told, _ = run(*sides.values())
    assert outcome == Outcome(1, failed=sides[failing], gave_up=True)
    assert len(starts(tmp_path, failing)) == 1 + QUICK.max_restarts
    assert len(told) == QUICK.max_restarts


def test_a_service_that_was_healthy_has_all_its_restarts_again(make: Make, tmp_path: Path) -> None:
    """Six crashes with one restart allowed: each time after it had run for longer than `healthy_s`."""
    policy = RestartPolicy(max_restarts=1, delay_s=0.02, healthy_s=0.05)
    outcome, told, restarts = run(
        make("learner", "if starts < 7:\n    time.sleep(0.1)\n    sys.exit(1)"), make("server", STAY), policy=policy
    )
    assert outcome == Outcome(0)
    assert restarts == {"learner": 6}
    assert all("restart 1 of 1" in line for line in told)


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("sys.exit(2)", 2),
        ("sys.exit(3)", 3),
        ("sys.exit(130)", 130),
        ("signal.signal(signal.SIGTERM, signal.SIG_DFL); os.kill(os.getpid(), signal.SIGTERM)", 130),
    ],
)
@pytest.mark.parametrize("failing", ["learner", "rollout_server"])
def test_what_would_fail_again_is_not_started_again(
    make: Make, tmp_path: Path, failing: str, ending: str, code: int
) -> None:
    sides = {name: make(name, ending if name == failing else STAY) for name in ("learner", "rollout_server")}
    outcome, told, _ = run(*sides.values())
    assert outcome == Outcome(code, failed=sides[failing])
    assert told == []
    assert len(starts(tmp_path, failing)) == 1


def test_the_side_that_explains_the_end_counts(make: Make) -> None:
    """The learner found bad state; its server crashed because of that, or complains about a lost learner."""
    for server_code in (1, 2, 3):
        learner = make("learner", "time.sleep(0.2); sys.exit(3)")
        server = make("rollout_server", f"time.sleep(0.15); sys.exit({server_code})")
        outcome, _, _ = run(learner, server)
        assert outcome == Outcome(3, failed=learner), server_code


def test_a_learner_that_is_done_but_for_its_exit_handlers_has_finished_the_run(make: Make, tmp_path: Path) -> None:
    """Whatever its server says meanwhile."""
    ending = tmp_path / "ending"
    learner = make("learner", f"signal.signal(signal.SIGTERM, signal.SIG_IGN); open('{ending}', 'w'); time.sleep(1.5)")
    server = make("rollout_server", f"while not os.path.exists('{ending}'): time.sleep(0.02)\nsys.exit(3)")
    outcome = Supervisor(learner, server, policy=QUICK, stop_s=10).run()
    assert (learner.code, server.code) == (0, 3)
    assert outcome == Outcome(0)


def test_a_server_that_a_crashing_learner_said_goodbye_to_is_started_with_it(make: Make, tmp_path: Path) -> None:
    learner = make("learner", "if starts == 1:\n    time.sleep(0.3)\n    sys.exit(1)\n" + until_here(tmp_path))
    outcome, told, restarts = run(learner, make("rollout_server", f"if starts > 1:\n    {STAY}"))
    assert outcome == Outcome(0)
    assert restarts == {"learner": 1, "rollout_server": 1}
    assert len(told) == 1, "the server did not crash"


def until_here(tmp_path: Path) -> str:
    return textwrap.dedent(until_starts(tmp_path, "rollout_server", 2))


def test_children_of_a_crashed_service_are_gone_before_it_starts_again(make: Make, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    script = f"""
        import subprocess
        if starts == 1:
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
            open({str(pid_file)!r}, "w").write(str(child.pid))
            os.kill(os.getpid(), signal.SIGKILL)
    """
    outcome, _, _ = run(make("learner", script), make("rollout_server", STAY))
    assert outcome == Outcome(0)
    pid = int(pid_file.read_text())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_an_interrupt_does_not_wait_for_a_restart(make: Make) -> None:
    services = make("learner", "sys.exit(1)"), make("rollout_server", STAY)
    supervisor = Supervisor(*services, policy=RestartPolicy(delay_s=60.0), tell=lambda _: signal.raise_signal(2))
    started = time.monotonic()
    assert supervisor.run() == Outcome(130)
    assert time.monotonic() - started < 5
    assert all(service.code is not None for service in services)


def test_delays_double_up_to_a_minute() -> None:
    policy = RestartPolicy(delay_s=1.0)
    delays = [policy.delay(attempt) for attempt in range(1, 1000)]
    assert delays[:5] == [1, 2, 4, 8, 16]
    assert all(later >= earlier for earlier, later in itertools.pairwise(delays))
    assert delays[-1] == LONGEST_DELAY_S


@pytest.mark.parametrize("terminal", [True, False])
def test_restarts_are_told_on_the_terminal(tmp_path: Path, terminal: bool) -> None:
    (tmp_path / "status.json").write_text(json.dumps({"phase": "training"}))
    output = io.StringIO()
    with Display(RunSnapshot(tmp_path), Console(file=output, force_terminal=terminal, width=120, height=60)) as display:
        display.note("learner was killed by SIGKILL; restart 1 of 5 in 1 s")
        shown = output.getvalue()
    assert "learner was killed by SIGKILL; restart 1 of 5 in 1 s" in shown
