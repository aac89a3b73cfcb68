"""`asyncrl health URL`: does a service do its work? For health checks of containers, so nothing heavy is imported."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Iterator

LONGEST_PULSE_S = 60.0
"""A service's thread that talks to the other side looks at its sockets many times a second."""
TIMEOUT_S = 4.0
_LINE = re.compile(r"^asyncrl_(learner|rollout)_(\w+)(?:\{([^}]*)\})? (\S+)$", re.MULTILINE)


def ailments(url: str) -> list[str]:
    """What is wrong with the service behind this Prometheus endpoint; nothing if it is well."""
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
            text = answer.read().decode()
    except (OSError, ValueError) as problem:
        return [f"{url} does not answer: {problem}"]
    found = {(name, labels): float(value) for _, name, labels, value in _LINE.findall(text)}
    if not found:
        return [f"{url} answers, but not as a service of asyncrl"]
    return list(_judge(found))


def _judge(found: dict[tuple[str, str], float]) -> Iterator[str]:
    pulse = found.get(("pulse_age_seconds", ""), 0.0)
    if pulse > LONGEST_PULSE_S:
        yield f"it has not looked at its sockets for {pulse:.0f} s"
    silence = found.get(("learner_silence_seconds", ""), 0.0)
    if silence > LONGEST_PULSE_S:
        yield f"the learner has been silent for {silence:.0f} s: is it running, and does network.host lead to it?"
    for (name, labels), value in found.items():
        if name == "stopped" and value and 'kind="finished"' not in labels:
            yield f"it has stopped ({labels}); the reason is in failure.json of the run directory"
    if found.get(("ledger_residual_groups", ""), 0.0):
        yield "the ledger's residual is not 0: groups are lost or counted twice"
