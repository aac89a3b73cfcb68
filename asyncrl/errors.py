"""Exceptions and exit codes of a run's processes, and what a mistyped name may have meant."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Iterable
from enum import IntEnum
from pathlib import Path
from typing import Any


class UserError(Exception):
    """Mistake in configuration, data or machine. The message says what is wrong, with the values and the fix."""


class RunTakenError(UserError):
    """Another process holds the run directory."""


class BadStateError(Exception):
    """The run cannot continue correctly (NaN loss, protocol violation); the message is saved as its reason."""


class WaitTimeoutError(BadStateError):
    """A server, a group or weights did not arrive in time; another attempt may succeed."""


class RestartError(Exception):
    """Error that ends this attempt so that the next one uses another setting: a crash with a known cause."""


class LearnerLeftError(Exception):
    """The learner disconnected before the run was finished; not an error of this server."""


class ExitCode(IntEnum):
    FINISHED = 0
    CRASHED = 1
    """Anything unforeseen; another attempt may succeed, and the launcher makes it."""
    USER_ERROR = 2
    """The user can fix it: the log's last `error:` line says how."""
    BAD_STATE = 3
    """The log's last `error:` line says why, and failure.json where the run ended with it. Another attempt would meet
    the same, unless a wait ran out."""
    LEARNER_LEFT = 4
    """A rollout server lost its learner, and is needed again when the learner continues the run."""
    INTERRUPTED = 130


METHOD_OVERLAYS = Path(__file__).parent / "algorithms" / "overlays"
"""The core's; each plug-in with methods has its own folder."""


def pasted(path: Path | str) -> str:
    """A path as a word of a command in a message, which a reader pastes into a shell."""
    return shlex.quote(str(path))


def close_names(name: str, choices: Iterable[str], at_most: int = 2) -> list[str]:
    """The most similar of the choices, best first; case does not count."""
    lower = {choice.lower(): choice for choice in choices}
    return [lower[close] for close in difflib.get_close_matches(name.lower(), lower, n=at_most, cutoff=0.6)]


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """A sentence with the most similar choice, after a space; empty if none is similar."""
    close = close_names(name, choices)
    return f" Did you mean {close[0]!r}?" if close else ""


def field_problem(detail: Any, fields: Iterable[str], prefix: str = "") -> str:
    """One error of a pydantic ValidationError, in words. `fields` of the model; `prefix` of its keys as users write
    them."""
    key, said = ".".join(map(str, detail["loc"])), detail["msg"].removeprefix("Value error, ")
    if not key:  # settings that do not go together
        return f"{prefix.rstrip('.')}: {said}" if prefix else said
    if detail["type"] == "missing":
        return f"{prefix}{key} is missing"
    if detail["type"] == "extra_forbidden":
        names = list(fields)
        there = f" There are {', '.join(names)}" if names else ""
        return f"unknown key {prefix}{key}.{did_you_mean(key, names) or there}"
    if said.startswith(f"{prefix}{key} is "):
        return said
    return f"{prefix}{key} is {detail['input']!r:.120}: {said}"


def file_hint(path: Path) -> str:
    """Half a sentence about a missing file: similar names in its folder, or where the path stops existing."""
    folder = path.parent
    if not folder.is_dir():
        existing = next(parent for parent in folder.absolute().parents if parent.is_dir())
        return f"the folder {folder} does not exist, only {existing}."
    names = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
    close = difflib.get_close_matches(path.name, names, n=3, cutoff=0.5)
    if close:
        return f"did you mean {' or '.join(str(folder / name) for name in close)}?"
    return f"{folder.resolve()} has {', '.join(names[:8]) or 'no files'}."
