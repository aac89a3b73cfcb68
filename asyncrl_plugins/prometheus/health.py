"""`asyncrl health URL`: does a service do its work? For health checks of containers, so nothing heavy is imported."""

from __future__ import annotations

import argparse
import re
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException
from math import isnan

LONGEST_PULSE_S = 60.0
"""Longest silence of a service's network thread, which looks at its sockets many times a second."""
LONGEST_START_S = 600.0
"""Longest silence of a learner that loads its model: nothing is wrong with the server that says hello to it."""
LONGEST_STEP_S = 1800.0
"""Longest step: without one for longer a learner is stalled. Its own deadlines (learner.wait_timeout_s,
network.start_timeout_s) are minutes and end it; what they do not see is a hang. A health check may lead to a restart:
the limit is far above a step, an evaluation or a checkpoint; the alert NoProgress knows how long steps take, and is
sooner."""
TIMEOUT_S = 4.0
"""Longest silence of the endpoint itself."""
_TEXT = r'"(?:[^"\\]|\\.)*"'
_LINE = re.compile(rf"^asyncrl_(?:learner|rollout)_(\w+)(?:\{{((?:[^\"}}]|{_TEXT})*)\}})? (\S+)$", re.MULTILINE)
_RUN = re.compile(rf"\brun={_TEXT},?")
"""The label that all series of a service share."""


def run(arguments: argparse.Namespace) -> int:
    found = find_problems(arguments.url)
    print("\n".join(found) or "well")
    return 1 if found else 0


def find_problems(url: str) -> list[str]:
    """List the problems of the service behind a metrics endpoint; a URL without a scheme is HTTP."""
    url = url if "://" in url else f"http://{url}"
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
            lines = _LINE.findall(answer.read().decode())
    except (OSError, ValueError, HTTPException) as error:
        return [f"{url} does not answer: {error!r}"]
    try:
        metrics = {(name, _RUN.sub("", labels).strip(",")): float(value) for name, labels, value in lines}
    except ValueError:
        metrics = {}
    return list(_judge(metrics)) if metrics else [f"{url} answers, but not as a service of asyncrl"]


def _judge(metrics: dict[tuple[str, str], float]) -> Iterator[str]:
    pulse = metrics.get(("pulse_age_seconds", ""), 0.0)
    if pulse > LONGEST_PULSE_S:
        yield f"it has not looked at its sockets for {pulse:.0f} s"
    age = metrics.get(("last_step_age_seconds", ""), 0.0)
    if age > LONGEST_STEP_S and not any(name == "stopped" and value for (name, _), value in metrics.items()):
        yield f"it has made no step for {age / 60:.0f} min: status.json of the run directory says what it waits for"
    silence = metrics.get(("learner_silence_seconds", ""), 0.0)
    has_weights = not isnan(metrics.get(("policy_version", ""), 0.0))  # of a server: it has been welcome
    if silence > (LONGEST_PULSE_S if has_weights else LONGEST_START_S):
        yield f"the learner has been silent for {silence:.0f} s: is it running, and does network.host lead to it?"
    for (name, labels), value in metrics.items():
        if name == "stopped" and value and 'kind="finished"' not in labels:
            yield f"it has stopped ({labels}); the last `error:` line of its log says why"
    if metrics.get(("ledger_residual_groups", ""), 0.0):
        yield "the ledger's residual is not 0: groups are lost or counted twice"
