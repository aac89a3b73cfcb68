"""The order of the examination: what costs nothing first, what needs an earlier answer after it, the trial last."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from asyncrl.config.load import load_config
from asyncrl.config.schema import RunConfig
from asyncrl.data.dataset import RowSource, open_train, open_validation
from asyncrl.data.prompts import PromptRenderer
from asyncrl.errors import ExitCode, UserError
from asyncrl.launch.inputs import check_media
from asyncrl.tools.doctor.devices import Device, find_devices
from asyncrl.tools.doctor.disk import find_disk
from asyncrl.tools.doctor.examination import Examination
from asyncrl.tools.doctor.findings import Finding, Findings, problem
from asyncrl.tools.doctor.machine import find_machine
from asyncrl.tools.doctor.model import find_model
from asyncrl.tools.doctor.network import find_network
from asyncrl.tools.doctor.ports import find_ports
from asyncrl.tools.doctor.report import Report
from asyncrl.tools.doctor.run_dir import find_run_dir
from asyncrl.tools.doctor.versions import find_versions

T = TypeVar("T")
PLAN_S = DATA_S = 300.0
"""Of a very large model or data set."""


@contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """A scheduler's or a `timeout`'s SIGTERM, too, leaves nothing of the trial."""
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


@terminated_as_interrupted()
def examine(file: Path | None, overrides: Sequence[str], *, quick: bool, as_json: bool) -> int:
    """Exit code 0 or 1: is there a problem? Of a configuration that cannot be read it is 2: as JSON a finding, else
    the UserError is raised.
    """
    began = time.monotonic()
    report = Report(as_json=as_json)
    try:
        config = load_config(file, overrides) if file else None
    except UserError as error:
        if not as_json:
            raise
        report.tell(problem("configuration", error), time.monotonic() - began)
        report.close(time.monotonic() - began)
        return ExitCode.USER_ERROR
    examination = Examination(report.tell)
    examination.check("versions", find_versions())
    examination.check("machine", find_machine())
    devices = examination.check("devices", find_devices()) or ()
    if config is not None:
        _examine_run(examination, config, devices)
        if quick:
            report.tell(Finding("trial", "not made (--quick)", "note"), 0.0)
        elif report.counts["problem"]:
            fix = "solve the problems above first"
            report.tell(Finding("trial", f"not made: {report.counts['problem']} problem(s)", "note", fix), 0.0)
        else:
            from asyncrl.tools.doctor.trial import find_by_trial

            examination.run("trial", find_by_trial(config))
    return report.close(time.monotonic() - began)


def _examine_run(examination: Examination, config: RunConfig, devices: Sequence[Device]) -> None:
    check = examination.check
    check("ports", find_ports(config))
    check("network", find_network(config))
    check("run_dir", find_run_dir(config))
    described = check("model", find_model(config))
    rows = check("training data", _rows(config, held_out=False, described=described), deadline_s=DATA_S)
    held_out = check("held-out data", _rows(config, held_out=True, described=described), deadline_s=DATA_S)
    if described is not None:
        _examine_memory(examination, config, devices, None if rows is None else len(rows))
    _examine_samples(examination, config, described, rows, held_out)


def _examine_memory(
    examination: Examination, config: RunConfig, devices: Sequence[Device], num_rows: int | None
) -> None:
    from asyncrl.tools.doctor.memory import find_memory

    plan = examination.check("memory plan", find_memory(config, devices), deadline_s=PLAN_S)
    if plan is not None:
        examination.check("disk of run_dir", find_disk(config, plan, num_rows))


def _rows(config: RunConfig, *, held_out: bool, described: dict[str, Any] | None) -> Findings[RowSource | None]:
    """Readable, with the columns that are needed, and nothing to see for a model without eyes."""
    rows = open_validation(config.data) if held_out else open_train(config.data)
    if rows is None:
        yield Finding("held-out data", "data.val_files is empty: nobody will see whether it generalises", "note")
    elif described is not None:
        check_media(config, described, rows)
    return rows


def _examine_samples(
    examination: Examination,
    config: RunConfig,
    described: dict[str, Any] | None,
    rows: RowSource | None,
    held_out: RowSource | None,
) -> None:
    check = examination.check
    renderer = check("template", _loaded(lambda: PromptRenderer(config.data)))
    if rows is None or renderer is None:
        return
    if described is not None:
        _examine_prompts(examination, config, rows, held_out, renderer)
    from asyncrl.tools.doctor.rewards import deadline_s, find_rewards

    check("reward", find_rewards(config, rows, renderer), deadline_s=deadline_s(config))


def _examine_prompts(
    examination: Examination,
    config: RunConfig,
    rows: RowSource,
    held_out: RowSource | None,
    renderer: PromptRenderer,
) -> None:
    from asyncrl.models.processing import PromptProcessor
    from asyncrl.tools.doctor.prompts import find_prompts, find_twins

    check, data = examination.check, config.data
    processor = check("processor", _loaded(lambda: PromptProcessor(config.model)))
    if processor is None:
        return
    train = check("prompts", find_prompts(data, rows, "training", renderer, processor), deadline_s=DATA_S)
    if held_out is None:
        return
    twins = check("prompts", find_prompts(data, held_out, "held-out", renderer, processor), deadline_s=DATA_S)
    if train is not None and twins is not None:
        check("held-out is apart", find_twins(train, twins))


def _loaded(load: Callable[[], T]) -> Findings[T]:
    """Nothing is said of what can be loaded."""
    yield from ()
    return load()
