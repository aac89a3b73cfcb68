"""The order of the examination: what costs nothing first, what needs an earlier answer after it, the trial last."""

from __future__ import annotations

import logging
import signal
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

from asyncrl.checks.inputs import check_algorithm, check_media, check_targets
from asyncrl.config.explain import method_line
from asyncrl.config.load import load_config
from asyncrl.config.schema import RunConfig
from asyncrl.data.dataset import RowSource, open_train, open_validation
from asyncrl.data.prompts import PromptRenderer
from asyncrl.errors import ExitCode, UserError
from asyncrl.processing.lean_imports import import_torchvision, not_installed
from asyncrl_plugins.doctor.findings import Finding, Findings, Report, problem
from asyncrl_plugins.doctor.machine import Device, find_devices, find_machine, listed_devices
from asyncrl_plugins.doctor.versions import find_versions

logger = logging.getLogger(__name__)

T = TypeVar("T")
LEFT_OUT = ("sklearn", "scipy", "accelerate")
"""Modules of transformers that are not imported: assisted generation, losses of object detection, models over several
devices. None of it decides which tokenizer or image processor a folder gets, or what these make of a prompt."""
_BROKEN = "if the message names nothing of yours, this is a defect of asyncrl: report it with the message"


def examine(file: Path | None, overrides: Sequence[str], *, quick: bool, as_json: bool) -> int:
    """Prints the findings. Exit code 1: there is a problem; 2: the configuration cannot be read, which as JSON is a
    finding, else a UserError.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # of a scheduler: the trial then leaves nothing, too
    report = Report(as_json=as_json)
    try:
        config = load_config(file, overrides) if file else None
    except UserError as error:
        if not as_json:
            raise
        report.add(problem("configuration", error))
        report.close()
        return ExitCode.USER_ERROR
    with listed_devices() as listing:
        run_check(report, "versions", find_versions())
        run_check(report, "machine", find_machine())
        devices = run_check(report, "devices", find_devices(listing)) or ()
    if config is not None:
        _examine_run(report, config, devices)
        if quick:
            report.add(Finding("trial", "not made (--quick)", "note"))
        elif problems := report.counts["problem"]:
            report.add(Finding("trial", f"not made: {problems} problem(s)", "note", "solve the problems above first"))
        else:
            from asyncrl_plugins.doctor.trial import find_by_trial

            run_check(report, "trial", find_by_trial(config))
    return report.close()


def _import_transformers() -> None:
    """Import transformers and let it remember that the packages of LEFT_OUT are not there: a quarter of the time of its
    models. Everything else in this process, such as the user's own functions, can import them before and after."""
    import_torchvision()
    with not_installed(LEFT_OUT):
        from transformers.utils import import_utils

        for package in LEFT_OUT:
            getattr(import_utils, f"is_{package}_available")()


def _examine_run(report: Report, config: RunConfig, devices: Sequence[Device]) -> None:
    _import_transformers()
    from asyncrl_plugins.doctor.data import find_overlap, find_prompts, find_rewards
    from asyncrl_plugins.doctor.disk import find_disk, find_run_dir
    from asyncrl_plugins.doctor.memory import find_memory, find_model
    from asyncrl_plugins.doctor.network import find_network, find_ports

    run_check(report, "ports", find_ports(config))
    run_check(report, "network", find_network(config))
    run_check(report, "run_dir", find_run_dir(config))
    model = run_check(report, "model", find_model(config))
    run_check(report, "algorithm", _load_functions(config))
    rows = run_check(report, "training data", _open_rows(config, held_out=False, model=model))
    held_out = run_check(report, "held-out data", _open_rows(config, held_out=True, model=model))
    plan = run_check(report, "memory plan", find_memory(config, devices)) if model else None
    if plan is not None:
        run_check(report, "disk of run_dir", find_disk(config, plan, None if rows is None else len(rows)))
    renderer = run_check(report, "template", _load_renderer(config))
    if rows is None or renderer is None:
        return
    surveys = [
        run_check(report, "prompts", find_prompts(config, source, purpose, renderer))
        for source, purpose in ((rows, "training"), (held_out, "held-out"))
        if source is not None and model is not None
    ]
    # What an environment opens with tells rows of one prompt apart.
    if len(surveys) == 2 and surveys[0] and surveys[1] and not config.environment.is_used:
        run_check(report, "held-out is apart", find_overlap(surveys[0], surveys[1]))
    run_check(report, "reward", find_rewards(config, rows, renderer, surveys[0] if surveys else None))


def _open_rows(config: RunConfig, *, held_out: bool, model: dict[str, Any] | None) -> Findings[RowSource | None]:
    """Opens the data with the columns that are needed, without media for a model that has no vision tower."""
    rows = open_validation(config.data, config.purpose) if held_out else open_train(config.data, config.purpose)
    if rows is None:
        yield Finding("held-out data", "data.val_files is empty: generalisation is not measured", "note")
    elif model is not None:
        check_media(config.model, config.data, model, rows)
    if rows is not None and not held_out:
        check_targets(config.algorithm, config.data.target_key, rows)
    return rows


def _load_functions(config: RunConfig) -> Findings[None]:
    check_algorithm(config.algorithm)
    yield Finding("algorithm", method_line(config.algorithm))


def _load_renderer(config: RunConfig) -> Findings[PromptRenderer]:
    """Reads the template. Nothing is found where it can be read."""
    yield from ()
    return PromptRenderer(config.data)


def run_check(report: Report, what: str, findings: Findings[T]) -> T | None:
    """Reports each finding as soon as it is made. Returns what the check returns.

    Where it fails, that is a finding too, and None: it must not hide what other checks find.
    """
    with closing(findings):
        while True:
            try:
                finding = next(findings)
            except StopIteration as end:
                return end.value
            except UserError as error:
                return report.add(problem(what, error))
            except Exception as error:
                logger.debug("the check %s failed", what, exc_info=True)
                text = f"could not be checked: {type(error).__name__}: {' '.join(str(error).split())}"
                return report.add(Finding(what, text, "problem", _BROKEN))
            report.add(finding)
