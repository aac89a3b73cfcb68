"""The learner's loop: repeat the steps that the journal holds, then receive - step - publish until done; the end."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from itertools import chain

from asyncrl.config.explain import method_line, schedule_notes
from asyncrl.config.load import dump_config
from asyncrl.config.secrets import secret_notes
from asyncrl.errors import BadStateError, UserError
from asyncrl.journal.run_inputs import recorded_updates
from asyncrl.run_folder.contents import EXPORT_FOLDER, save_config
from asyncrl.run_folder.failure import kind_of
from asyncrl.telemetry.jsonl import write_atomically
from asyncrl.telemetry.timeline import LEARNER
from asyncrl.telemetry.tracker import tracker_sources
from learner.groups.ticket import ReceivedGroup
from learner.loop.clean_stop import INTERRUPTED, StopAsked
from learner.loop.policy_export import finish_export
from learner.loop.resume import ROW_DIGESTS, scoring_changes
from learner.network.publication import publish
from learner.service import FINISHED, Learner
from learner.training.step import NotFiniteError
from protocol.faults import crash_point

logger = logging.getLogger(__name__)

FEW_STEPS = 3
"""Steps that may be made again after a restart without a checkpoint behind them."""


def train(learner: Learner) -> None:
    """Train to the last step and export, or to the step in which a signal comes.

    Says goodbye to the servers unless this is a crash: then they wait for the learner that comes next.
    """
    with learner.stop.listening(), learner.resources:
        try:
            _make_all_steps(learner)
        except KeyboardInterrupt as interruption:
            if gone := learner.gone_rank():
                _fail(learner, gone)
                raise gone from interruption
            learner.stop.tell_loss(learner.saver, learner.progress.step)
            _end(learner, "interrupted", "interrupted", INTERRUPTED)
            raise
        except Exception as error:
            reason = learner.leader.reason_of(error) if learner.leader else error
            _fail(learner, reason)
            if reason is error:
                raise
            raise reason from error


def _make_all_steps(learner: Learner) -> None:
    try:
        _begin(learner)
        while not learner.progress.is_last:
            _one_step(learner)
    except StopAsked:
        if not learner.gone_rank():
            learner.stop.save(learner.saver, learner.schedule, learner.network, learner.device)
        raise
    learner.schedule.take_device_back()
    _save(learner, is_last=True)
    _export(learner)
    _end(learner, "finished", "finished", FINISHED)


def _begin(learner: Learner) -> None:
    """Start the network thread, repeat journaled steps, and publish the first weights."""
    learner.held.accept()
    logger.info("method: %s", method_line(learner.config.algorithm))
    config, steps = learner.config, learner.progress.total_steps
    for note in chain(secret_notes(config.environment, config.reward), schedule_notes(config, steps)):
        logger.warning("%s", note)
    save_config(learner.config.run_path, dump_config(learner.config))
    write_atomically(config.run_path / ROW_DIGESTS, learner.writer.train_survey.digests(), durable=False)
    trackers = tracker_sources(config.telemetry)
    learner.reporter.started(learner.progress.step, learner.engine.device, trackers=trackers)
    learner.reporter.rows(learner.writer.bad_rows, held_out_trained=learner.writer.num_held_out_trained)
    changed_after = [change.after_step for change in recorded_updates(learner.journal, "inputs")[1:]]
    learner.reporter.inputs(
        learner.inputs_changed, scoring_changes=scoring_changes(learner.journal), after=changed_after
    )
    learner.status("starting")
    learner.network.start()
    if _make_steps_again(learner) > FEW_STEPS and not learner.progress.is_last:
        _save(learner)  # else another end before the next checkpoint would make them all once more
    learner.schedule.end_with_the_data()
    if learner.was_finished and not learner.schedule.needs_server:
        logger.info("step %d was the last: nothing is left to do for a server", learner.progress.step)
    else:  # also at the last step of a learner that died: its servers are to hear that the run is finished
        learner.schedule.wait_for_server()
        _publish(learner)  # version 0, too: a server may have loaded another folder of the same architecture
        learner.schedule.open_for_work()


# --- steps ------------------------------------------------------------------------------------


def _make_steps_again(learner: Learner) -> int:
    """Repeat the steps after the newest checkpoint whose groups the journal holds: they give the same weights.
    Returns their number."""
    first, last = learner.progress.step + 1, learner.ledger.last_step
    if first > last:
        return 0
    logger.info("making steps %d to %d again, from the journal", first, last)
    while learner.progress.step < last:
        learner.network.check()
        if learner.schedule.is_evaluation_due:
            learner.schedule.wait_for_server()
            _publish(learner)
            learner.schedule.evaluate_again()
            learner.schedule.take_device_back()
        learner.status("catching up", f"step {learner.progress.step + 1} of {last} from the journal")
        started = time.monotonic()
        step, drop_changed = learner.progress.step + 1, learner.accepts_changes
        groups = learner.ledger.take_again(step, learner.writer.write, drop_changed=drop_changed)
        _learn(learner, groups, started, publish=False)
    return last - first + 1


def _one_step(learner: Learner) -> None:
    """Receive, learn, publish, let new tickets out, report."""
    started = time.monotonic()
    learner.stop.check()
    learner.saver.settle()
    held_up_s = learner.schedule.wait_for_batch()
    if learner.ledger.is_over:  # what was still awaited has been dropped
        learner.schedule.end_with_the_data()
        learner.schedule.open_for_work()
        learner.schedule.finish_evaluation()  # one that has begun when this was not known to be the last step
        return
    learner.status("training")
    groups = learner.ledger.take()
    beats = (server.heartbeat for server in list(learner.network.servers.connected.values()))
    learner.threads.choose(learner.training, groups, filter(None, beats))
    _learn(learner, groups, started + held_up_s, publish=True)
    if learner.device.is_shared:
        _save_if_due(learner)  # while it is ours
        learner.schedule.open_for_work()
    else:
        learner.schedule.open_for_work()
        _save_if_due(learner)


def _save_if_due(learner: Learner) -> None:
    if learner.saver.is_due():
        learner.schedule.finish_evaluation(before_step=learner.progress.step)
        _save(learner)


def _learn(learner: Learner, groups: Sequence[ReceivedGroup], started: float, *, publish: bool) -> None:
    version = learner.progress.version
    waited = time.monotonic()
    try:
        batch, values = learner.training.learn(groups)
    except NotFiniteError as error:
        learner.exporter.not_finite(error.number)
        raise
    learned = time.monotonic()
    crash_point("step.trained")
    learner.ledger.bound = learner.training.bound
    learner.ledger.advance(learner.progress.version)
    learner.schedule.end_with_the_data()
    published_bytes = 0
    if publish:
        published_bytes = _publish(learner)
        learner.schedule.admit_unless_evaluating()
    published = time.monotonic()
    step_s = published - started
    values |= {
        "step_s": step_s,
        "wait_s": waited - started,
        "learn_s": learned - waited,
        "model_flops_per_s": learner.flops.of(batch.train_groups) / (learned - waited),
        "publish_s": published - learned,
        "publish_bytes": float(published_bytes),
        "idle/learner": (waited - started) / step_s,
        "tokens_per_s/learner": values["tokens"] / step_s,
        **learner.device.report(),
        **learner.saver.report(),
    }
    learner.reporter.step(learner.progress.step, version, values, batch, learner.training.step.trained)
    learner.judge.watch(learner.progress.step, values)
    learner.status("training" if publish else "catching up")


def _publish(learner: Learner) -> int:
    """Publish the weights, and return the bytes of the version."""
    manifest = publish(learner.publication, learner.engine, learner.progress.version, learner.device_sender)
    learner.network.call_soon(learner.network.servers.announce, manifest)
    learner.exporter.published(manifest)
    return manifest.total_bytes


def _save(learner: Learner, *, is_last: bool = False) -> None:
    """Begin to write a checkpoint. The last one is waited for."""
    with learner.network.timeline.doing(LEARNER, "saving"):
        learner.saver.save()
        if is_last:
            learner.saver.finish()


def _export(learner: Learner) -> None:
    """Write the end product, and say how far it is from the policy that was sampled."""
    folder, config = learner.config.run_path / EXPORT_FOLDER, learner.config
    learner.engine.export(learner.processor.processor, folder)
    sampled = config.rollout.precision(config.model.quantization)
    record = finish_export(config.model, sampled, learner.processor, learner.writer.some_prompts, folder)
    logger.log(logging.WARNING if record.differs else logging.INFO, "finished: %s is %s", folder, record.describe())


# --- the end and the status -----------------------------------------------------------------------


def _fail(learner: Learner, error: Exception) -> None:
    learner.held.save(error)
    kind, why, goodbye = kind_of(error), str(error), "the learner failed"
    if not isinstance(error, BadStateError | UserError):
        why = f"{type(error).__name__}: {error}"
        goodbye = "the learner's disk is full" if kind else None  # after a crash servers wait for the next learner
    _end(learner, "failed", kind or "crash", goodbye, why)


def _end(learner: Learner, phase: str, kind: str, goodbye: str | None, why: str = "") -> None:
    """Record the end of the run. A full disk must not hide the reason."""
    learner.goodbye = goodbye
    learner.exporter.stopped(kind)
    try:
        learner.status(phase, why)
    except OSError as problem:
        logger.error("status.json could not be written: %s", problem)
