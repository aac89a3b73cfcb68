"""Endings of a run's processes: as exceptions, and as exit codes that the launcher and scripts see."""

from __future__ import annotations

from enum import IntEnum


class UserError(Exception):
    """Something in the configuration, the data or the machine. The message says what, the values, and the fix."""


class RunTakenError(UserError):
    """The run directory is another process's."""


class BadStateError(Exception):
    """The run cannot go on honestly (NaN loss, protocol violation). It stops with this as its saved reason."""


class WaitTimeoutError(BadStateError):
    """Something that has to come did not, within its deadline: a server, a group, weights. It may, another time."""


class LearnerLeftError(Exception):
    """The learner said goodbye to this server before the run was finished. Nothing is wrong here."""


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
