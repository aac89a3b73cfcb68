"""Both services are watched, explained and never left behind. Small scripts stand in for them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from asyncrl.launch.processes import LAST_LINES, Service, available_cores, service_environment
from asyncrl.launch.supervisor import Outcome, RestartPolicy, Supervisor
from tests.rigs.waiting import wait_until

SLEEP = "import time; time.sleep(60)"
IGNORE = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(60)"
)


@pytest.fixture
def make(tmp_path: Path) -> Callable[[str, str], Service]:
    def make(name: str, script: str) -> Service:
        return Service(name, [sys.executable, "-c", textwrap.dedent(script)], tmp_path / "logs" / f"{name}.log", {})

    return make


NEVER = RestartPolicy(max_restarts=0)


def run(learner: Service, rollout: Service, policy: RestartPolicy = NEVER, **options: float) -> tuple[Outcome, float]:
    started = time.monotonic()
    outcome = Supervisor(learner, rollout, policy=policy, **options).run()
    assert learner.code is not None
    assert rollout.code is not None
    return outcome, time.monotonic() - started


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def read_pid(path: Path) -> int:
    wait_until(lambda: path.exists() and path.read_text().endswith("\n"), f"a process id in {path.name}")
    return int(path.read_text())


def starts_a_child(path: Path, then: str) -> str:
    return f"""
        import subprocess, sys, time
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        open({str(path)!r}, "w").write(f"{{child.pid}}\\n")
        {then}
    """


def test_a_run_ends_well_when_the_learner_does(make) -> None:
    outcome, _ = run(make("learner", "print('done')"), make("rollout_server", "import time; time.sleep(0.3)"))
    assert outcome == Outcome(0)


def test_a_server_that_ends_in_order_before_the_learner_is_no_failure(make) -> None:
    outcome, _ = run(make("learner", "import time; time.sleep(1.5)"), make("rollout_server", "pass"))
    assert outcome == Outcome(0)


@pytest.mark.parametrize("failing", ["learner", "rollout_server"])
def test_when_one_side_crashes_the_other_is_stopped_and_the_log_is_shown(make, failing: str) -> None:
    crash = "for n in range(50): print('line', n)\nraise RuntimeError('the reason')"
    sides = {name: make(name, crash if name == failing else SLEEP) for name in ("learner", "rollout_server")}
    outcome, seconds = run(sides["learner"], sides["rollout_server"])
    assert outcome == Outcome(1, failed=sides[failing], gave_up=True)
    words = sides[failing].last_words().splitlines()
    assert len(words) == LAST_LINES
    assert words[-1] == "RuntimeError: the reason"
    assert seconds < 5


def test_a_mistake_of_the_user_shows_its_whole_message_and_nothing_else(make) -> None:
    message = "error: two problems:\\n- first\\n- second"
    learner = make("learner", f"import sys; print('loading', flush=True); print('{message}'); sys.exit(2)")
    outcome, _ = run(learner, make("rollout_server", SLEEP))
    assert outcome == Outcome(2, failed=learner)
    assert learner.last_words() == "error: two problems:\n- first\n- second"


def test_a_service_that_ignores_sigterm_is_killed_after_the_deadline(make) -> None:
    stubborn = make("rollout_server", IGNORE)
    ready = stubborn.log
    learner = make(
        "learner", f"import os, sys, time\nwhile not os.path.getsize({str(ready)!r}): time.sleep(0.02)\nsys.exit(1)"
    )
    ready.parent.mkdir()
    ready.touch()
    outcome, seconds = run(learner, stubborn, stop_s=0.5)
    assert outcome.code == 1
    assert stubborn.code == -signal.SIGKILL
    assert "killed by SIGKILL" in stubborn.ending()
    assert learner.ending() == "learner ended with code 1"
    assert 0.5 < seconds < 6


@pytest.mark.parametrize("then", ["sys.exit(1)", "time.sleep(60)"])
def test_children_of_a_service_go_with_it(make, tmp_path: Path, then: str) -> None:
    """Whether it crashed itself or was stopped because the other side did."""
    pid_file = tmp_path / "pid"
    other = f"import os, sys, time\nwhile not os.path.exists({str(pid_file)!r}): time.sleep(0.02)\nsys.exit(1)"
    outcome, _ = run(make("learner", other), make("rollout_server", starts_a_child(pid_file, then)))
    assert outcome.code == 1
    wait_until(lambda: is_gone(read_pid(pid_file)), "the end of the service's child")


CHILD = """
import os, signal, sys, time
if sys.argv[2] == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
with open(sys.argv[1], "w") as file:
    file.write(f"{os.getpid()}\\n")
time.sleep(60)
"""
LAUNCHER = """
import sys
from pathlib import Path
from asyncrl.launch.processes import Service
from asyncrl.launch.supervisor import Supervisor
folder, manner, script = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
services = [
    Service(name, [sys.executable, "-c", script, str(folder / name), manner], folder / f"{name}.log", {})
    for name in ("learner", "rollout_server")
]
sys.exit(Supervisor(*services).run().code)
"""


@pytest.fixture
def launch(tmp_path: Path):
    """Starts a real launcher with two children of the given manner; returns it and their process ids."""
    started: list[int] = []

    def launch(manner: str) -> tuple[subprocess.Popen[bytes], list[int]]:
        launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, str(tmp_path), manner, CHILD])
        started.append(launcher.pid)
        pids = [read_pid(tmp_path / name) for name in ("learner", "rollout_server")]
        started.extend(pids)
        return launcher, pids

    yield launch
    for pid in started:
        if not is_gone(pid):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_interrupt_ends_the_launcher_and_both_services(launch, number: signal.Signals) -> None:
    launcher, pids = launch("polite")
    launcher.send_signal(number)
    assert launcher.wait(timeout=10) == 130
    assert all(is_gone(pid) for pid in pids)


def test_a_second_interrupt_does_not_wait_for_the_deadline(launch) -> None:
    launcher, pids = launch("stubborn")
    launcher.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        launcher.wait(timeout=1)
    assert not any(is_gone(pid) for pid in pids), "the first interrupt only asks"
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(timeout=5) == 130
    assert all(is_gone(pid) for pid in pids)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells children of their parent's death")
def test_services_end_even_when_the_launcher_is_killed(launch) -> None:
    launcher, pids = launch("polite")
    launcher.kill()
    launcher.wait(timeout=5)
    wait_until(lambda: all(is_gone(pid) for pid in pids), "the services to follow their launcher")


def test_the_cores_are_shared_half_and_half_unless_the_configuration_says_so() -> None:
    assert service_environment(0)["OMP_NUM_THREADS"] == str(max(1, available_cores() // 2))
    assert service_environment(3)["OMP_NUM_THREADS"] == "3"
    assert service_environment(0, taking_turns=True)["OMP_NUM_THREADS"] == str(available_cores())


def test_a_service_is_started_again_though_nothing_more_can_be_logged(tmp_path: Path) -> None:
    log = tmp_path / "service.log"
    log.symlink_to("/dev/full")
    service = Service("service", [sys.executable, "-c", "pass"], log, {})
    for _ in range(2):
        service.start()
        assert service.process is not None
        assert service.process.wait(timeout=30) == 0
