"""The run directory in the hands of one learner. Why it stops is said there by whoever has it, and by nobody else."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from asyncrl.run_folder.failure import FAILURE_FILE, FailureRoom, failure_of, refuse_bad_state
from asyncrl.run_folder.full_disk import is_disk_full
from asyncrl.run_folder.lock import LEARNER_LOCK, holding, not_ours, refuse_other_launcher


class LearnerLock:
    """A context, from the lock to its release. Whatever ends it is saved in `failure.json`, unless it is a crash.

    Before `accept` the run is as it was: that a configuration is refused, or that there is no room to load, is no
    failure of it. Only bad state is, such as a damaged journal. Raises RunTakenError and UserError at the lock, OSError
    where the disk is full.
    """

    def __init__(self, run_path: Path, service: str = "learner", *, unattended: bool = False):
        """`unattended`: not after bad state. BadStateError, then."""
        self._run_path = run_path
        self._service = service
        self._unattended = unattended
        self._room = FailureRoom(run_path / FAILURE_FILE)
        self._is_accepted = self._is_saved = False

    def __enter__(self) -> Self:
        refuse_other_launcher(self._run_path)
        with ExitStack() as resources:
            resources.enter_context(holding(self._run_path, LEARNER_LOCK))
            if self._unattended:  # whoever held it may have said so just now
                refuse_bad_state(self._run_path)
            try:
                resources.enter_context(self._room)
            except OSError as error:
                if is_disk_full(error):
                    raise
                raise not_ours(self._run_path, error) from None
            self._resources = resources.pop_all()
        return self

    def accept(self) -> None:
        """The run begins or goes on: what stopped it before is past."""
        self._is_accepted = True
        (self._run_path / FAILURE_FILE).unlink(missing_ok=True)

    def save(self, error: BaseException) -> None:
        """At once, for a reason that is not to wait until all is closed. The first one counts."""
        failure = failure_of(error, self._service, self._run_path)
        if failure and not self._is_saved and (self._is_accepted or failure.kind == "bad_state"):
            self._is_saved = self._room.save(failure)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        try:
            if error is not None:
                self.save(error)
        finally:
            self._resources.close()
