"""Start a run from Python and wait for its end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import yaml

from asyncrl.config.load import dump_config, find_overlay, load_config
from asyncrl.config.schema import RunConfig
from asyncrl.errors import BadStateError, ExitCode, UserError, file_hint
from asyncrl.run_folder.contents import INPUTS_FOLDER
from asyncrl.run_folder.failure import read_failure
from asyncrl.telemetry.jsonl import JsonlTail
from asyncrl.telemetry.recorder import METRICS_FILE
from asyncrl_plugins.python_api.rows import files_of
from asyncrl_plugins.python_api.run import Run
from asyncrl_plugins.python_api.source import place_of

SET_BY_ARGUMENTS = ("reward.functions", "data.train_files", "data.val_files", "environment.name")
"""Keys that the arguments `reward`, `data`, `held_out` and `environment` set."""
Given = RunConfig | Mapping[str, Any] | str | Path
Callback = Callable[[Run, dict[str, Any]], None]


def train(
    config: Given,
    *overrides: str,
    reward: Any = None,
    data: Any = None,
    held_out: Any = None,
    environment: Any = None,
    callbacks: Sequence[Callback] = (),
    resume: bool = False,
    accept_changes: bool = False,
) -> Run:
    """Run to the end, as `asyncrl train` does, and return the run.

    Args:
        config: a YAML file, its contents as a dict, or a RunConfig.
        overrides: `key=value` and names of methods or files, as on the command line.
        reward: a function, or a list of functions, of one sample or of TRL's form (docs/rewards.md).
        data: rows to train on: a list of dicts, a table of the datasets library or of pandas, or file names.
        held_out: rows that are never trained on, in the same forms.
        environment: a class whose episodes the policy plays (docs/agents.md).
        callbacks: functions of the run and a new step's metrics, called in this process. One that raises ends the run.
        resume: continue the run in run_dir; other rewards or rows than it had are refused, but for `accept_changes`.

    Raises:
        UserError: the configuration, the data or the machine does not fit; the message says what to do.
        BadStateError: the run ended by an error, which the message names.
        KeyboardInterrupt: the run was interrupted; it has saved what it can continue from.
    """
    if threading.current_thread() is not threading.main_thread():
        raise UserError("train() waits for signals, which reach a program's main thread alone. Call it there")
    for key, argument in zip(SET_BY_ARGUMENTS, (reward, data, held_out, environment), strict=True):
        if argument is not None and any(word.startswith((f"{key}=", f"{key}+=")) for word in overrides):
            raise UserError(
                f"{key} is given twice: by an argument of train(), and as {key}=... Leave one of the two out"
            )
    inputs = _run_path(config, overrides) / INPUTS_FOLDER
    changes: dict[str, Any] = {}
    if reward is not None:
        functions = reward if isinstance(reward, list | tuple) else [reward]
        changes["reward"] = {"functions": [{"function": place_of(function, inputs)} for function in functions]}
    if environment is not None:
        changes["environment"] = {"name": place_of(environment, inputs)}
    for key, rows in (("train_files", data), ("val_files", held_out)):
        if rows is not None:
            changes.setdefault("data", {})[key] = files_of(rows, inputs, key.removesuffix("_files"))
    whole = _whole(config, overrides, changes)
    run = Run(whole.run_path)
    from asyncrl.launch.train import train as launch  # loads torch

    watch = _Watch(run, callbacks)
    code = launch(whole, resume=resume, accept_changes=accept_changes, on_tick=watch.look)
    watch.look()
    if code == ExitCode.INTERRUPTED:
        raise KeyboardInterrupt
    if code != ExitCode.FINISHED:
        failure = read_failure(run.folder)
        why = failure.reason if failure else f"its last words stand above, and in {run.folder / 'logs'}"
        raise (UserError if code == ExitCode.USER_ERROR else BadStateError)(why)
    return run


def _run_path(config: Given, overrides: Sequence[str]) -> Path:
    """The run directory, before the configuration is whole: rows of the caller are written into it first."""
    overlays = (find_overlay(word) for word in overrides if "=" not in word)
    texts = [_text_of(config), *(_text_of(file) for file in overlays)]
    try:
        named = [
            given["run_dir"] for text in texts if isinstance(given := yaml.safe_load(text), dict) and "run_dir" in given
        ]
    except yaml.YAMLError as problem:
        raise UserError(f"the configuration is no YAML: {' '.join(str(problem).split())}") from None
    named += [word.partition("=")[2] for word in overrides if word.startswith("run_dir=")]
    if not named:
        raise UserError("run_dir is not set: the configuration names the folder of the run. Add run_dir=runs/first")
    return Path(named[-1])


def _whole(config: Given, overrides: Sequence[str], changes: Mapping[str, Any]) -> RunConfig:
    """The configuration with the overrides, and with the caller's rows and functions. Raises UserError."""
    with TemporaryDirectory() as folder:
        file, laid_over = Path(folder) / "config.yaml", Path(folder) / "arguments.yaml"
        if isinstance(config, str | Path):
            file = Path(config)
        else:
            file.write_text(_text_of(config), encoding="utf-8")
        laid_over.write_text(yaml.safe_dump(dict(changes)), encoding="utf-8")
        try:
            return load_config(file, [*overrides, *([str(laid_over)] if changes else ())])
        except UserError as error:
            raise UserError(str(error).replace(f"{folder}/", "")) from None


def _text_of(config: Given) -> str:
    if isinstance(config, RunConfig):
        return dump_config(config, whole=False)
    if isinstance(config, Mapping):
        try:
            return yaml.safe_dump(_plain(config))
        except yaml.YAMLError as problem:
            raise UserError(
                f"the configuration has a value that YAML has not: {problem}. Give texts and numbers"
            ) from None
    try:
        return Path(config).read_text(encoding="utf-8")
    except OSError as problem:
        raise UserError(f"cannot read {config}: {problem.strerror}. {file_hint(Path(config))}") from None


def _plain(value: Any) -> Any:
    """The value with paths as texts, and numbers of numpy as Python's."""
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, Path) else value.item() if isinstance(value, np.generic) else value


class _Watch:
    """Tells the callbacks of each new step, once: a learner that goes back to its checkpoint makes some again."""

    def __init__(self, run: Run, callbacks: Sequence[Callback]):
        self._run, self._callbacks = run, callbacks
        self._steps = JsonlTail(run.folder / METRICS_FILE)
        self._told = max((step.get("step", 0) for step in self._steps.new_records()[0]), default=0)

    def look(self) -> None:
        for step in self._steps.new_records()[0] if self._callbacks else ():
            if step.get("step", 0) > self._told:
                self._told = step["step"]
                for callback in self._callbacks:
                    callback(self._run, step)
