"""The health check of a service by its metrics endpoint."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from asyncrl.cli import main as asyncrl
from asyncrl_plugins.prometheus.health import LONGEST_PULSE_S, LONGEST_START_S, LONGEST_STEP_S, find_problems


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
