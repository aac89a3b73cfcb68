"""Both services are watched, explained and never left behind. Small scripts stand in for them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from asyncrl.launch.processes import ServiceProcess
from asyncrl.launch.supervisor import LONGEST_DELAY_S, Outcome, RestartPolicy, Supervisor
from tests.rigs.waiting import wait_until

NEVER = RestartPolicy(max_restarts=0)
QUICK = RestartPolicy(max_restarts=3, first_delay_s=0.05)
COUNT = """
    import os, signal, sys, time
    path = sys.argv[1]
    open(path, "a").write(" ".join(sys.argv[2:]) + "\\n")
    starts = len(open(path).readlines())
"""
"""How often the stand-in has been started, and with which arguments."""

Make = Callable[..., ServiceProcess]


@pytest.fixture
def counted(tmp_path: Path) -> Make:
    def counted(name: str, script: str, again: tuple[str, ...] = ()) -> ServiceProcess:
        code = textwrap.dedent(COUNT) + textwrap.dedent(script)
        command = [sys.executable, "-S", "-c", code, str(tmp_path / f"{name}.starts")]
        return ServiceProcess(name, command, tmp_path / "logs" / f"{name}.log", {}, lambda: again)

    return counted


def starts(tmp_path: Path, name: str) -> list[str]:
    return (tmp_path / f"{name}.starts").read_text().splitlines()


def watch(*services: ServiceProcess, policy: RestartPolicy = QUICK) -> tuple[Outcome, list[str], dict[str, int]]:
    told: list[str] = []
    supervisor = Supervisor(*services, policy=policy, notify=told.append, stop_s=0.5)
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


def test_a_log_without_end_is_bounded_and_keeps_the_last_words(
    counted: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.launch.processes.LOG_BYTES", 20_000)
    monkeypatch.setattr("asyncrl.launch.supervisor.POLL_S", 0.02)
    talk = """
        for number in range(1000):
            print(f"line {number} " + "x" * 800, flush=True)
            time.sleep(0.001)
        time.sleep(0.5)  # what is written while a log is moved can be lost
        print("error: enough said", flush=True)
        time.sleep(0.1)
        sys.exit(2)
    """
    learner = counted("learner", talk)
    outcome, _, _ = watch(learner)
    assert outcome.code == 2
    assert learner.last_words() == "error: enough said"
    sizes = {file.name: file.stat().st_size for file in (tmp_path / "logs").iterdir()}
    assert set(sizes) == {"learner.log", "learner.log.1"}
    assert sizes["learner.log.1"] == 20_000
    assert sum(sizes.values()) < 200_000, "of 800,000"


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def read_pid(path: Path) -> int:
    wait_until(lambda: path.exists() and path.read_text().endswith("\n"), f"a process id in {path.name}")
    return int(path.read_text())


def test_a_mistake_of_the_user_shows_its_whole_message_and_nothing_else(counted: Make) -> None:
    message = "error: two problems:\\n- first\\n- second"
    learner = counted("learner", f"print('loading', flush=True); print('{message}'); sys.exit(2)")
    outcome, _, _ = watch(learner, counted("rollout_server", STAY))
    assert outcome == Outcome(2, failed=learner)
    assert learner.last_words() == "error: two problems:\n- first\n- second"


def test_a_service_that_ignores_sigterm_is_killed_after_the_deadline(counted: Make, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    ignore = f"signal.signal(signal.SIGTERM, signal.SIG_IGN); open({str(ready)!r}, 'w'); {STAY}"
    stubborn = counted("rollout_server", ignore)
    learner = counted("learner", f"while not os.path.exists({str(ready)!r}): time.sleep(0.02)\nsys.exit(1)")
    began = time.monotonic()
    outcome, _, _ = watch(learner, stubborn, policy=NEVER)
    assert outcome == Outcome(1, failed=learner, gave_up=True)
    assert stubborn.code == -signal.SIGKILL
    assert "killed by SIGKILL" in stubborn.ending()
    assert learner.ending() == "learner ended with code 1"
    assert 0.5 < time.monotonic() - began < 6


@pytest.mark.parametrize("then", ["sys.exit(1)", "time.sleep(60)"])
def test_children_of_a_service_go_with_it(counted: Make, tmp_path: Path, then: str) -> None:
    """Whether it crashed itself or was stopped because the other side did."""
    pid_file = tmp_path / "pid"
    other = f"while not os.path.exists({str(pid_file)!r}): time.sleep(0.02)\nsys.exit(1)"
    parent = f"""
        import subprocess
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        open({str(pid_file)!r}, "w").write(f"{{child.pid}}\\n")
        {then}
    """
    outcome, _, _ = watch(counted("learner", other), counted("rollout_server", parent), policy=NEVER)
    assert outcome.code == 1
    wait_until(lambda: is_gone(read_pid(pid_file)), "the end of the service's child")


def launched(counted: Make, folder: Path, script: str) -> tuple[Any, list[int]]:
    """A launcher of its own with two services, which run the script once they are there; their process ids."""
    return launched_both(counted, folder, dict.fromkeys(("learner", "rollout_server"), script))


def launched_both(counted: Make, folder: Path, scripts: dict[str, str]) -> tuple[Any, list[int]]:
    """The same, with a script for each by its name."""
    ready = "open({!r}, 'w').write(f'{{os.getpid()}}\\n')\n"
    names = tuple(scripts)
    services = [
        counted(name, f"{textwrap.dedent(script)}\n{ready.format(str(folder / name))}{STAY}")
        for name, script in scripts.items()
    ]
    launcher = multiprocessing.get_context("fork").Process(target=lambda: sys.exit(Supervisor(*services).run().code))
    launcher.start()
    return launcher, [read_pid(folder / name) for name in names]


def test_a_second_interrupt_does_not_wait_for_the_deadline(counted: Make, tmp_path: Path) -> None:
    launcher, pids = launched(counted, tmp_path, "signal.signal(signal.SIGTERM, signal.SIG_IGN)")
    os.kill(launcher.pid, signal.SIGINT)
    launcher.join(timeout=1)
    assert launcher.is_alive()
    assert not any(is_gone(pid) for pid in pids), "the first interrupt only asks"
    os.kill(launcher.pid, signal.SIGINT)
    launcher.join(timeout=5)
    assert launcher.exitcode == 130
    assert all(is_gone(pid) for pid in pids)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells children of their parent's death")
def test_services_end_even_when_the_launcher_is_killed(counted: Make, tmp_path: Path) -> None:
    launcher, pids = launched(counted, tmp_path, "")
    launcher.kill()
    launcher.join(timeout=5)
    wait_until(lambda: all(is_gone(pid) for pid in pids), "the services to follow their launcher")


# --- restarts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["raise OSError('gone')", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_a_learner_that_crashes_is_resumed_and_its_server_stays(counted: Make, tmp_path: Path, ending: str) -> None:
    learner = counted("learner", f"if starts < 3:\n    {ending}", again=("--resume",))
    outcome, told, restarts = watch(learner, counted("rollout_server", STAY))
    assert outcome == Outcome(0)
    assert starts(tmp_path, "learner") == ["", "--resume", "--resume"]
    assert len(starts(tmp_path, "rollout_server")) == 1
    assert restarts == {"learner": 2}
    assert [line.split("; ")[1] for line in told] == ["restart 1 of 3 in 0.05 s", "restart 2 of 3 in 0.1 s"]
    assert told[0].startswith("learner ")
    assert learner.log.read_text().count("it is started again") == 2


@pytest.mark.parametrize(
    ("ending", "said"),
    [
        ("raise OSError('gone')", " (OSError: gone)"),
        ("print('2026-11-26 10:00:00 learner ERROR   a.b: rank 1 was killed'); sys.exit(1)", " (rank 1 was killed)"),
        ("print('error: not now'); sys.exit(1)", " (not now)"),
        ("print('no error: all is well'); sys.exit(1)", ""),
    ],
)
def test_the_line_about_a_crash_says_why_if_the_log_does(counted: Make, ending: str, said: str) -> None:
    _, told, _ = watch(counted("learner", f"if starts < 2:\n    {ending}\nelif starts < 3:\n    sys.exit(1)"))
    assert [line.split("; ")[0] for line in told] == [f"learner ended with code 1{said}", "learner ended with code 1"]


@pytest.mark.parametrize("failing", ["learner", "rollout_server"])
def test_after_the_last_restart_the_run_ends(counted: Make, tmp_path: Path, failing: str) -> None:
    sides = {name: counted(name, "sys.exit(1)" if name == failing else STAY) for name in ("learner", "rollout_server")}
    outcome, told, _ = watch(*sides.values())
    assert outcome == Outcome(1, failed=sides[failing], gave_up=True)
    assert len(starts(tmp_path, failing)) == 1 + QUICK.max_restarts
    assert len(told) == QUICK.max_restarts


def test_a_service_that_was_healthy_has_all_its_restarts_again(counted: Make, tmp_path: Path) -> None:
    """Six crashes with one restart allowed: each time after it had run for longer than `healthy_s`."""
    policy = RestartPolicy(max_restarts=1, first_delay_s=0.02, healthy_s=0.05)
    outcome, told, restarts = watch(
        counted("learner", "if starts < 7:\n    time.sleep(0.1)\n    sys.exit(1)"),
        counted("server", STAY),
        policy=policy,
    )
    assert outcome == Outcome(0)
    assert restarts == {"learner": 6}
    assert all("restart 1 of 1" in line for line in told)


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("sys.exit(2)", 2),
        ("signal.signal(signal.SIGTERM, signal.SIG_DFL); os.kill(os.getpid(), signal.SIGTERM)", 130),
    ],
)
@pytest.mark.parametrize("failing", ["learner", "rollout_server"])
def test_what_would_fail_again_is_not_started_again(
    counted: Make, tmp_path: Path, failing: str, ending: str, code: int
) -> None:
    sides = {name: counted(name, ending if name == failing else STAY) for name in ("learner", "rollout_server")}
    outcome, told, _ = watch(*sides.values())
    assert outcome == Outcome(code, failed=sides[failing])
    assert told == []
    assert len(starts(tmp_path, failing)) == 1


@pytest.mark.parametrize(
    "ending",
    [
        "sys.exit(130)",
        *(f"signal.signal({n}, signal.SIG_DFL); os.kill(os.getpid(), {n})" for n in (signal.SIGTERM, signal.SIGINT)),
    ],
)
@pytest.mark.parametrize("gone", [1, 2])
def test_a_server_that_a_signal_ends_is_not_missed_while_another_one_is_left(
    counted: Make, tmp_path: Path, ending: str, gone: int
) -> None:
    """A spot machine that is taken back: what it has begun, the others go on with."""
    signalled = [counted(f"server-{number}", ending) for number in range(gone)]
    begun = "".join(textwrap.dedent(until_starts(tmp_path, f"server-{number}", 1)) for number in range(gone))
    outcome, told, restarts = watch(counted("learner", f"{begun}time.sleep(0.8)"), *signalled, counted("server", STAY))
    assert outcome == Outcome(0)
    assert sorted(line.partition(" ")[0] for line in told) == [f"server-{number}" for number in range(gone)]
    assert not restarts
    assert len(starts(tmp_path, "server-0")) == 1


def test_the_last_server_that_a_signal_ends_ends_the_run(counted: Make, tmp_path: Path) -> None:
    later = textwrap.dedent(until_starts(tmp_path, "server-0", 1)) + "time.sleep(0.4); sys.exit(130)"
    servers = [counted("server-0", "sys.exit(130)"), counted("server-1", later)]
    outcome, told, _ = watch(counted("learner", STAY), *servers)
    assert outcome == Outcome(130, failed=servers[1])
    assert len([line for line in told if "the other servers go on" in line]) == 1


def test_the_learner_is_stopped_before_its_servers(counted: Make, tmp_path: Path) -> None:
    """In shared mode it waits for them to return the device; an evaluation may have to end."""
    ended, late = tmp_path / "ended", tmp_path / "late"
    writes = f"signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.3), open({str(ended)!r}, 'w'), sys.exit(130)))"
    looks = f"""
        def look(*_):
            open({str(late)!r}, "w").write(str(os.path.exists({str(ended)!r})))
            sys.exit(130)
        signal.signal(signal.SIGTERM, look)
    """
    launcher, _ = launched_both(counted, tmp_path, {"learner": writes, "rollout_server": looks})
    os.kill(launcher.pid, signal.SIGTERM)
    launcher.join(timeout=10)
    assert launcher.exitcode == 130
    assert late.read_text() == "True"


def test_the_side_that_explains_the_end_counts(counted: Make) -> None:
    """The learner found bad state; its server crashed because of that, or complains about a lost learner."""
    for server_code in (1, 2, 3):
        learner = counted("learner", "time.sleep(0.2); sys.exit(3)")
        server = counted("rollout_server", f"time.sleep(0.15); sys.exit({server_code})")
        outcome, _, _ = watch(learner, server)
        assert outcome == Outcome(3, failed=learner), server_code


def test_a_learner_that_is_done_but_for_its_exit_handlers_has_finished_the_watch(counted: Make, tmp_path: Path) -> None:
    """Whatever its server says meanwhile."""
    ending = tmp_path / "ending"
    learner = counted(
        "learner", f"signal.signal(signal.SIGTERM, signal.SIG_IGN); open('{ending}', 'w'); time.sleep(1.5)"
    )
    server = counted("rollout_server", f"while not os.path.exists('{ending}'): time.sleep(0.02)\nsys.exit(3)")
    outcome = Supervisor(learner, server, policy=QUICK, stop_s=10).run()
    assert (learner.code, server.code) == (0, 3)
    assert outcome == Outcome(0)


def test_a_server_that_a_crashing_learner_said_goodbye_to_is_started_with_it(counted: Make, tmp_path: Path) -> None:
    waits = textwrap.dedent(until_starts(tmp_path, "rollout_server", 2))
    learner = counted("learner", "if starts == 1:\n    time.sleep(0.3)\n    sys.exit(1)\n" + waits)
    outcome, told, restarts = watch(learner, counted("rollout_server", f"if starts > 1:\n    {STAY}"))
    assert outcome == Outcome(0)
    assert restarts == {"learner": 1, "rollout_server": 1}
    assert len(told) == 1, "the server did not crash"


def test_an_interrupt_does_not_wait_for_a_restart(counted: Make) -> None:
    services = counted("learner", "sys.exit(1)"), counted("rollout_server", STAY)
    supervisor = Supervisor(
        *services, policy=RestartPolicy(5, first_delay_s=60.0), notify=lambda _: signal.raise_signal(2)
    )
    started = time.monotonic()
    assert supervisor.run() == Outcome(130)
    assert time.monotonic() - started < 5
    assert all(service.code is not None for service in services)


def test_delays_double_up_to_a_minute() -> None:
    delays = [RestartPolicy(5).delay_s(attempt) for attempt in range(1, 1000)]
    assert delays[:5] == [1, 2, 4, 8, 16]
    assert delays[-1] == LONGEST_DELAY_S
