"""`asyncrl train`: check everything cheap first, then run both services and show the run."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from itertools import chain
from pathlib import Path
from typing import Any

from asyncrl.checks.inputs import check_inputs, data_notes, gpus_of_run
from asyncrl.config.explain import method_line, schedule_notes
from asyncrl.config.load import dump_config
from asyncrl.config.schema import RunConfig
from asyncrl.config.secrets import secret_notes
from asyncrl.data.dataset import open_train
from asyncrl.devices.gpu_assignment import assign_gpus, describe_assignment
from asyncrl.errors import BadStateError, ExitCode, UserError
from asyncrl.journal import JOURNAL_FILE
from asyncrl.journal.database import JournalReader
from asyncrl.journal.full_disk import describe_full_disk, is_disk_full, room_left
from asyncrl.journal.run_inputs import check_scoring, scoring_settings
from asyncrl.launch.display import (
    MISSING,
    RunProgress,
    number,
    open_display,
    scored_alike,
)
from asyncrl.launch.ports import reserve_ports
from asyncrl.launch.processes import learner_service, server_services
from asyncrl.launch.supervisor import Outcome, RestartPolicy, Supervisor
from asyncrl.run_folder.contents import CANDIDATE_FILE, EXPORT_FOLDER, check_run_dir, is_resumable, save_config
from asyncrl.run_folder.export_record import read_record
from asyncrl.run_folder.failure import FAILURE_FILE, describe_lost, read_failure
from asyncrl.run_folder.lock import LAUNCHER_LOCK, LEARNER_LOCK, holding, refuse_busy
from asyncrl.telemetry.recorder import BAD_ROWS_FILE
from asyncrl.telemetry.wasted_steps import LEARNS_NOTHING, USUAL_CAUSES, without_spread
from protocol.messages import TrajectoryStatus

logger = logging.getLogger(__name__)

LOST_S = 1.0
"""Time after which a directory that is not there is no hiccup of a network's file system."""
LOST = [status for status in TrajectoryStatus if not status.is_scored]


def train(
    config: RunConfig, *, resume: bool, accept_changes: bool = False, on_tick: Callable[[], None] = lambda: None
) -> int:
    """Run to the end; returns the exit code. Nothing is written before every cheap check has passed.

    `on_tick` is called several times a second; what it raises ends the services in order.
    """
    refuse_busy(config.run_path)
    check_run_dir(config.run_path, resume=resume)
    if resume and not accept_changes:
        _check_scoring(config.run_path / JOURNAL_FILE, scoring_settings(config.reward, config.environment))
    check_inputs(config, "learner", "rollout_server")
    try:
        with reserve_ports(config, _note) as resolved, holding(config.run_path, LAUNCHER_LOCK):
            refuse_busy(config.run_path, LEARNER_LOCK)  # one that was started without a launcher
            check_run_dir(config.run_path, resume=resume)  # another launcher may have been here meanwhile
            try:
                return _launch(resolved, resume=resume, accept_changes=accept_changes, on_tick=on_tick)
            finally:
                with suppress(OSError):
                    (config.run_path / CANDIDATE_FILE).unlink()
    except OSError as error:
        if is_disk_full(error):
            raise BadStateError(describe_full_disk(error, config.run_path)) from None
        if lost := describe_lost(config.run_path):
            raise BadStateError(f"{lost} ({error})") from None
        raise


def _check_scoring(file: Path, scoring: Mapping[str, Any]) -> None:
    """Refuse other rewards than the run had, before a service loads a model. A damaged journal is the learner's."""
    with suppress(BadStateError), closing(JournalReader(file, untouched=True)) as journal:
        check_scoring(journal, scoring)


def _note(text: str) -> None:
    print(f"note: {text}", flush=True)


def _launch(config: RunConfig, *, resume: bool, accept_changes: bool, on_tick: Callable[[], None]) -> int:
    file = write_candidate(config)
    gpus = gpus_of_run(config.learner.device, config.rollout.device)
    learner = learner_service(config, file, resume=resume, accept_changes=accept_changes, gpus=gpus)
    services = [learner, *server_services(config, file, gpus=gpus)]
    print(f"run directory {config.run_dir}: logs/, then config.yaml, metrics.jsonl, samples.jsonl", flush=True)
    print(f"method {method_line(config.algorithm)}", flush=True)
    # Without max_steps, steps follow from the rows.
    rows = 0 if config.trainer.max_steps else len(open_train(config.data, config.purpose))
    schedules = schedule_notes(config, config.total_steps(rows))
    of_data = data_notes(config.data, config.reward, config.environment, config.purpose)
    for note in chain(secret_notes(config.environment, config.reward), schedules, of_data):
        _note(note)
    if gpus:
        print(f"GPUs: {describe_assignment(assign_gpus(config, len(gpus)), gpus)}", flush=True)
    with open_display(config.run_path, since=time.time()) as display:
        supervisor = Supervisor(
            *services,
            policy=RestartPolicy(config.launch.max_restarts),
            grace_s=config.trainer.stop_grace_s,
            notify=display.note,
        )

        def tick() -> None:
            check_kept(config.run_path)
            display.tick()
            on_tick()

        outcome = supervisor.run(tick)
    if outcome.failed and outcome.failed.failure:
        _adopt(outcome.failed.failure, display.run)
    if supervisor.restarts:
        counts = ", ".join(f"{name} {count}" for name, count in sorted(supervisor.restarts.items()))
        print(f"started again: {counts}", flush=True)
    return report(config, outcome, display.run)


def check_kept(run_path: Path) -> None:
    """Raise BadStateError where the directory of a run under way is lost for LOST_S: a learner would train for nothing
    until its next checkpoint, and what is started again then finds no configuration."""
    deadline = time.monotonic() + LOST_S
    while lost := describe_lost(run_path, CANDIDATE_FILE):
        if time.monotonic() > deadline:
            raise BadStateError(lost)
        time.sleep(LOST_S / 5)


def _adopt(file: Path, run: RunProgress) -> None:
    """Move a server's failure record to the run, if it was under way and the learner has none of its own."""
    failure, is_under_way = read_failure(file.parent, file.name), run.status and run.phase != "finished"
    if failure is None or failure.time < run.since or not is_under_way or read_failure(run.run_dir):
        return
    try:
        with holding(run.run_dir, LEARNER_LOCK):
            file.replace(run.run_dir / FAILURE_FILE)  # needs no disk space
    except (UserError, OSError) as problem:  # another learner continues it already, or there is no space for a lock
        logger.warning("the reason stays in %s: %s", file, problem)


def write_candidate(config: RunConfig) -> Path:
    """Write the resolved configuration that both services read."""
    try:
        return save_config(config.run_path, dump_config(config), CANDIDATE_FILE)
    except OSError as error:
        if is_disk_full(error):
            raise
        file = config.run_path / CANDIDATE_FILE
        raise UserError(f"cannot write {file}: {error.strerror}. Set another run_dir=...") from None


def report(config: RunConfig, outcome: Outcome, run: RunProgress) -> int:
    """Print how the run ended and where everything is."""
    if outcome.failed is not None and outcome.code != ExitCode.INTERRUPTED:
        print(_why(config, outcome, run.since), file=sys.stderr)
        return outcome.code
    if found := without_spread(run.steps):
        print(f"warning: {LEARNS_NOTHING}: {found}. {USUAL_CAUSES}")
    if outcome.code == ExitCode.FINISHED:
        if unscored := sum(_is_unscored(step) for step in run.steps):
            print(
                f"warning: no trajectory of {unscored} of the last {len(run.steps)} steps could be scored: they taught "
                f"nothing. The newest failure is {run.status.get('unscored') or 'in logs/'}"
            )
        elif lost := sum(int(step.get(f"rows/{status}") or 0) for step in run.steps for status in LOST):
            print(
                f"{lost:,} trajectories of the last {len(run.steps)} steps have no score and were left out; the newest "
                f"failure: {run.status.get('unscored') or 'in logs/'}"
            )
        if masked := sum(step.get("mask_fraction") == 1.0 for step in run.steps):
            print(
                f"warning: all tokens of {masked} of the last {len(run.steps)} steps were masked: they taught nothing. "
                "`asyncrl report` says why"
            )
        if run.evaluations:
            alike = scored_alike(run.evaluations)
            before, after = alike[0], alike[-1]
            shown = [number(e.get("accuracy")) for e in ((before, after) if after is not before else (after,))]
            also = int(run.status.get("held_out_trained") or 0)
            trained = f", of which {also:,} are trained on, too" if also else ""
            print(f"held-out accuracy {' -> '.join(shown)} over {after.get('rows', MISSING)} rows{trained}")
            if earlier := run.evaluations[: -len(alike)]:
                step = earlier[-1].get("step")
                print(f"rewards or held-out rows changed after step {step}: its held-out accuracy does not compare")
        for source, count in run.status.get("bad_rows", {}).items() if run.status else ():
            print(f"{count:,} {source} rows were left out, named in {config.run_path / BAD_ROWS_FILE}")
        record = read_record(config.run_path / EXPORT_FOLDER)
        print(f"model    {config.run_path / EXPORT_FOLDER}{f': {record.describe()}' if record else ''}")
        print(f"metrics  {config.run_path / 'metrics.jsonl'}")
        print(f"samples  {config.run_path / 'samples.jsonl'}")
    else:
        reason = f"{outcome.failed.name} got SIGTERM or SIGINT, ending the run" if outcome.failed else "interrupted"
        resumable = is_resumable(config.run_path)
        print(f"{reason}; the same command with --resume continues" if resumable else f"{reason} before it had begun")
    sys.stdout.flush()
    return outcome.code


def _is_unscored(step: Mapping[str, Any]) -> bool:
    """Whether no trajectory of a recorded step has a score."""
    rows = {status: step.get(f"rows/{status}", 0.0) for status in TrajectoryStatus}
    return any(rows.values()) and not any(count for status, count in rows.items() if status.is_scored)


def _why(config: RunConfig, outcome: Outcome, since: float) -> str:
    """Describe what ended the run, with the fix or the last lines of the log."""
    service = outcome.failed
    assert service is not None
    if outcome.code == ExitCode.USER_ERROR:
        return service.last_words()
    if outcome.code == ExitCode.BAD_STATE:
        failure = read_failure(config.run_path)
        if failure is None or failure.time < since:  # it could not be saved, or is an earlier attempt's
            words = service.last_words()
            if words.startswith("error: "):
                return words
            room = room_left(config.run_path)
            return f"error: {service.ending()}; its log does not say why ({room} there)\n{words}"
        log = service.log if service.name.startswith(failure.service) else service.log.parent
        saved = f"; saved in {config.run_path / FAILURE_FILE}, log {log}"
        return f"error: {failure.reason}\n{failure.service} stopped the run{saved}"
    limit = ""
    if outcome.gave_up:
        restarts = config.launch.max_restarts
        limit = f" once more after {restarts} restarts (launch.max_restarts)" if restarts else ""
    fix = "Continue with --resume, and raise launch.max_restarts for more automatic restarts"
    return f"{service.ending()}{limit}. {fix}; the last lines of {service.log}:\n{service.last_words()}"
