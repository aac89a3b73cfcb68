"""The order of the examination: what costs nothing first, what needs an earlier answer after it, the trial last."""

from __future__ import annotations

import logging
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from asyncrl.config.load import load_config
from asyncrl.config.schema import RunConfig
from asyncrl.data.dataset import RowSource, open_train, open_validation
from asyncrl.errors import ExitCode, UserError
from asyncrl.launch.inputs import check_media
from asyncrl.tools.doctor.disk import find_disk, find_run_dir
from asyncrl.tools.doctor.findings import Finding, Findings, Report, problem
from asyncrl.tools.doctor.machine import Device, find_devices, find_machine
from asyncrl.tools.doctor.network import find_network, find_ports
from asyncrl.tools.doctor.versions import find_versions

logger = logging.getLogger(__name__)

T = TypeVar("T")
DEADLINE_S = 60.0
PLAN_S = DATA_S = 300.0
"""Deadlines for a very large model or data set."""
_BROKEN = "if the message names nothing of yours, this is a defect of asyncrl: report it with the message"


@contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM of a scheduler or of `timeout` leaves nothing of the trial, as an interrupt does."""
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


@terminated_as_interrupted()
def examine(file: Path | None, overrides: Sequence[str], *, quick: bool, as_json: bool) -> int:
    """Prints the findings. Exit code 1: there is a problem; 2: the configuration cannot be read, which as JSON is a
    finding, else a UserError.
    """
    report = Report(as_json=as_json)
    try:
        config = load_config(file, overrides) if file else None
    except UserError as error:
        if not as_json:
            raise
        report.add(problem("configuration", error))
        report.close()
        return ExitCode.USER_ERROR
    check = partial(check_in_thread, report.add)
    check("versions", find_versions())
    check("machine", find_machine())
    devices = check("devices", find_devices()) or ()
    if config is not None:
        _examine_run(check, config, devices)
        if quick:
            report.add(Finding("trial", "not made (--quick)", "note"))
        elif problems := report.counts["problem"]:
            report.add(Finding("trial", f"not made: {problems} problem(s)", "note", "solve the problems above first"))
        else:
            from asyncrl.tools.doctor.trial import find_by_trial

            # In this thread: it keeps its own deadline, and cleans up when it is interrupted.
            run_check(report.add, "trial", find_by_trial(config))
    return report.close()


def _examine_run(check: Any, config: RunConfig, devices: Sequence[Device]) -> None:
    """`check` is `check_in_thread` with a report."""
    from asyncrl.tools.doctor.data import find_prompts, find_rewards, find_twins, load_renderer, rewards_deadline_s
    from asyncrl.tools.doctor.memory import find_memory, find_model

    check("ports", find_ports(config))
    check("network", find_network(config))
    check("run_dir", find_run_dir(config))
    model = check("model", find_model(config))
    rows = check("training data", _open_rows(config, held_out=False, model=model), deadline_s=DATA_S)
    held_out = check("held-out data", _open_rows(config, held_out=True, model=model), deadline_s=DATA_S)
    plan = check("memory plan", find_memory(config, devices), deadline_s=PLAN_S) if model else None
    if plan is not None:
        check("disk of run_dir", find_disk(config, plan, None if rows is None else len(rows)))
    renderer = check("template", load_renderer(config.data))
    if rows is None or renderer is None:
        return
    looks = [
        check("prompts", find_prompts(config, source, purpose, renderer), deadline_s=DATA_S)
        for source, purpose in ((rows, "training"), (held_out, "held-out"))
        if source is not None and model is not None
    ]
    if len(looks) == 2 and None not in looks:
        check("held-out is apart", find_twins(*looks))
    check("reward", find_rewards(config, rows, renderer), deadline_s=rewards_deadline_s(config))


def _open_rows(config: RunConfig, *, held_out: bool, model: dict[str, Any] | None) -> Findings[RowSource | None]:
    """Opens the data with the columns that are needed, without media for a model that has no vision tower."""
    rows = open_validation(config.data) if held_out else open_train(config.data)
    if rows is None:
        yield Finding("held-out data", "data.val_files is empty: nobody will see whether it generalises", "note")
    elif model is not None:
        check_media(config, model, rows)
    return rows


def check_in_thread(
    report: Callable[[Finding], None], what: str, findings: Findings[T], *, deadline_s: float = DEADLINE_S
) -> T | None:
    """Runs one check in a thread, which is left behind where it hangs, and reports each finding as soon as it is made.

    Returns what the check returns; None if it failed or was not done in time, which is reported.
    """
    until = time.monotonic() + deadline_s
    made: queue.SimpleQueue[Finding | None] = queue.SimpleQueue()
    product: list[T | None] = []

    def work() -> None:
        product.append(run_check(made.put, what, findings))
        made.put(None)

    threading.Thread(target=work, name=what, daemon=True).start()
    try:
        while finding := made.get(timeout=max(0.0, until - time.monotonic())):
            report(finding)
    except queue.Empty:
        fix = f"something behind `{what}` hangs: a network file system, a download, a driver, or code of yours"
        report(Finding(what, f"was not done after {deadline_s:g} s", "problem", fix))
        return None
    return product[0]


def run_check(report: Callable[[Finding], None], what: str, findings: Findings[T]) -> T | None:
    """Reports the findings of one check. Where it fails, that is a finding too: it must not hide what others find."""
    with closing(findings):
        while True:
            try:
                finding = next(findings)
            except StopIteration as end:
                return end.value
            except UserError as error:
                return report(problem(what, error))
            except Exception as error:
                logger.debug("the check %s failed", what, exc_info=True)
                text = f"could not be checked: {type(error).__name__}: {' '.join(str(error).split())}"
                return report(Finding(what, text, "problem", _BROKEN))
            report(finding)
