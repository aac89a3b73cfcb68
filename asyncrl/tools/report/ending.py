"""How a run ended, or how it goes on: what is wrong with that."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator

from asyncrl.telemetry.alert_thresholds import THRESHOLDS, longest_step_s
from asyncrl.tools.report.finding import Finding
from asyncrl.tools.report.limits import RESTARTS
from asyncrl.tools.report.markup import count, duration
from asyncrl.tools.report.run import Run, number


def stopped(run: Run) -> Iterator[Finding]:
    if run.failure:
        at = f" after step {run.failure.step}" if run.failure.step is not None else ""
        kind = run.failure.kind.replace("_", " ") if isinstance(run.failure.kind, str) else "failed"
        value = f"{run.failure.service}, {kind}{at}: {run.failure.reason}"
        log = "logs/learner.log" if run.failure.service == "learner" else "the rollout server's log"
        advice = f"Mend the cause, then continue with --resume; {log} has the moment before."
        yield Finding("critical", "The run stopped", value, advice)
    elif run.ending == "failed":
        value = str(run.status.get("waiting_for") or "no reason was saved")
        yield Finding("critical", "The learner failed", value, "Look at logs/learner.log; --resume continues.")


def silent(run: Run) -> Iterator[Finding]:
    spoke = number(run.status.get("time"))
    if run.failure or run.ending in ("finished", "failed", "interrupted") or spoke is None:
        return
    silent_s, limit = time.time() - spoke, THRESHOLDS["LearnerSilent"]
    if silent_s > limit.value + limit.hold_s:
        advice = "If it is meant to be running, look at logs/learner.log; --resume continues from what is journaled."
        at = f"silent for {duration(silent_s)} while {run.ending or 'starting'}"
        yield Finding("critical", "The learner fell silent", at, advice)


def no_progress(run: Run) -> Iterator[Finding]:
    """Of a learner that is heard of. An evaluation has deadlines of its own."""
    if run.failure or run.ending != "training" or list(silent(run)):
        return
    began = max((t for start in run.starts if (t := number(start.get("time")))), default=0.0)
    steps = [step for step in run.steps if (number(step.get("time")) or 0.0) > began]
    seconds = [s for step in steps if (s := number(step.get("step_s"))) is not None]
    waited_s = time.time() - (steps[-1]["time"] if steps else began)
    if began and waited_s > longest_step_s(sum(seconds) / len(seconds) if seconds else None):
        advice = "status.json says what it waits for, logs/learner.log what was last. Stop it and --resume."
        value = f"none for {duration(waited_s)}, while the learner answers"
        yield Finding("critical", "No step is made", value, advice)


def restarts(run: Run) -> Iterator[Finding]:
    again = run.starts[1:]
    if again:
        steps = ", ".join(str(start.get("step", "?")) for start in again[-8:])
        value = f"{count(len(again), 'restart')} of the learner, after steps {steps}"
        advice = "Nothing is lost by a restart; logs/learner.log says what each cost and why."
        yield Finding("warning" if len(again) > RESTARTS else "info", "It was started again", value, advice)


def disk(run: Run) -> Iterator[Finding]:
    if run.ending == "finished":
        return
    free = shutil.disk_usage(run.path).free
    if free < THRESHOLDS["DiskFilling"].value:
        advice = "Make room: old runs, trainer.save_limit, trainer.journal_limit_mib."
        yield Finding("warning", "The disk is nearly full", f"{free / 2**30:.2g} GiB free", advice)
