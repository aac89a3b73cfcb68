"""Exceptions and exit codes of a run's processes."""

from __future__ import annotations

from enum import IntEnum


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
    """The user can mend it: the log's last `error:` line says how."""
    BAD_STATE = 3
    """The log's last `error:` line says why, and failure.json where the run ended with it. Another attempt would meet
    the same, unless a wait ran out."""
    LEARNER_LEFT = 4
    """A rollout server lost its learner, and is needed again when the learner continues the run."""
    INTERRUPTED = 130
