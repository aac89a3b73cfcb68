"""A service that a machine starts again, and its health check."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from asyncrl.cli import main as asyncrl
from asyncrl.config.load import dump_config
from asyncrl.config.schema import RunConfig
from asyncrl.errors import BadStateError
from asyncrl.journal import JOURNAL_FILE
from asyncrl.run_folder.contents import next_attempt
from asyncrl.run_folder.failure import FAILURE_FILE, Kind
from asyncrl.telemetry.health import LONGEST_PULSE_S, LONGEST_START_S, LONGEST_STEP_S, find_problems
from asyncrl.telemetry.recorder import RunRecorder
from asyncrl.telemetry.timeline import WaitClock
from tests.rigs.small_runs import save_failure


def _begun(config: RunConfig) -> Path:
    config.run_path.mkdir(parents=True, exist_ok=True)
    (config.run_path / JOURNAL_FILE).touch()
    return config.run_path


def test_it_begins_continues_tries_again_what_another_time_may_mend_and_ends(
    make_config: Callable[..., RunConfig],
) -> None:
    config = make_config()
    assert next_attempt(config.run_path) == "begin"
    run = _begun(config)
    assert next_attempt(config.run_path) == "continue"
    kinds: tuple[Kind, ...] = ("timed_out", "disk_full", "user_error")
    for kind in kinds:
        save_failure(run, kind, reason="waited 5 s for a rollout server")
        assert next_attempt(config.run_path) == "continue"
    save_failure(run, "bad_state")
    with pytest.raises(BadStateError, match=r"the loss is nan.*--resume"):
        next_attempt(config.run_path)
    (run / FAILURE_FILE).unlink()
    RunRecorder(run).status(phase="finished")
    assert next_attempt(config.run_path) == "nothing"


@pytest.mark.parametrize("begun", [True, False])
def test_its_learner_knows_that_nobody_watches_it(
    make_config: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    config, file, became = make_config(), tmp_path / "config.yaml", []
    file.write_text(dump_config(config))
    if begun:
        _begun(config)
    monkeypatch.setattr("asyncrl.launch.one_service.become", lambda *arguments: became.extend(arguments))
    asyncrl(["learn", str(file), "--unattended"])
    assert became == ["learner", "--config", str(file), *(["--resume"] if begun else []), "--unattended"]


# --- health ------------------------------------------------------------------------------------------


@contextmanager
def _endpoint(answer: str) -> Iterator[str]:
    """The address of a server that answers one request."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(answer.encode())

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}/metrics"
        thread.join(timeout=10)


OK = "HTTP/1.1 200 OK\r\n\r\n"
WELL = (
    "# HELP asyncrl_learner_step s\nasyncrl_learner_step 3.0\nasyncrl_learner_pulse_age_seconds 0.2\n"
    "asyncrl_learner_ledger_residual_groups 0.0\n"
)
WAITS = "asyncrl_rollout_policy_version NaN\nasyncrl_rollout_learner_silence_seconds"
"""A server that no learner has welcomed yet."""


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ("", []),
        ('asyncrl_learner_stopped{kind="finished"} 1.0\n', []),
        ('asyncrl_learner_stopped{kind="bad_state"} 1.0\n', ["it has stopped"]),
        (f"asyncrl_learner_pulse_age_seconds {LONGEST_PULSE_S + 1}\n", ["has not looked at its sockets for 61 s"]),
        ("asyncrl_learner_ledger_residual_groups 2.0\n", ["residual is not 0"]),
        ('asyncrl_learner_ledger_residual_groups{run="runs/{\\"odd\\"}"} 2.0\n', ["residual is not 0"]),
        ('asyncrl_learner_stopped{kind="finished",run="runs/demo"} 1.0\n', []),
        (f"asyncrl_learner_last_step_age_seconds {LONGEST_STEP_S - 1}\n", []),
        (f"asyncrl_learner_last_step_age_seconds {LONGEST_STEP_S + 1}\n", ["no step for 30 min"]),
        ("asyncrl_learner_last_step_age_seconds NaN\n", []),
        ('asyncrl_learner_last_step_age_seconds 9e9\nasyncrl_learner_stopped{kind="finished"} 1.0\n', []),
        ("asyncrl_rollout_learner_silence_seconds 90.0\n", ["the learner has been silent for 90 s"]),
        (f"{WAITS} {LONGEST_START_S - 1}\n", []),
        (f"{WAITS} {LONGEST_START_S + 1}\n", ["the learner has been silent for 601 s"]),
    ],
)
def test_health_names_what_is_wrong(more: str, says: list[str]) -> None:
    with _endpoint(OK + WELL + more) as url:
        found = find_problems(url)
    assert len(found) == len(says)
    assert all(text in ailment for text, ailment in zip(says, found, strict=True)), found


def test_health_of_a_service_that_is_well_is_exit_code_0() -> None:
    with _endpoint(OK + WELL) as url:
        assert asyncrl(["health", url]) == 0
    assert f"{url} does not answer" in find_problems(url)[0]


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (OK + "hello", "not as a service of asyncrl"),
        (OK + "asyncrl_learner_step three\n", "not as a service of asyncrl"),
        ("HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nasyncrl_learner_step 3.0\n", "does not answer"),
        ("what?\r\n", "does not answer"),
        ("", "does not answer"),
    ],
)
def test_health_of_a_broken_answer_is_words(answer: str, says: str) -> None:
    with _endpoint(answer) as url:
        (found,) = find_problems(url)
    assert says in found


# --- waiting -----------------------------------------------------------------------------------------


def test_a_wait_inside_another_counts_for_itself_alone_and_a_wait_that_goes_on_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    clock = WaitClock()
    with clock.waiting("groups"):
        now += 3
        with clock.waiting("device"):
            now += 5
            assert clock.totals() == {"groups": 3, "device": 5}
        now += 1
    now += 10
    assert clock.totals() == {"groups": 4, "device": 5}
