"""Checkpoints: model, optimiser, random state and the step they belong to in one folder, whole or absent.

Of a model with an adapter only the adapter is saved: the base weights are those of `model.path`.

A snapshot is taken between two steps; its files may be written while the next steps are made (saver.py).

Which data has been trained stands in the journal. A checkpoint is the journal's shortcut: without one, a learner
makes all steps again. Each file's checksum is kept beside it: weights with a flipped bit load without an error.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash

from asyncrl.devices.host_copies import host_copy
from asyncrl.errors import BadStateError, UserError, WaitTimeoutError
from asyncrl.journal.full_disk import is_disk_full
from asyncrl.models.lora import read_adapter, write_adapter_folder
from asyncrl.run_folder.contents import (
    ADAPTER_FOLDER,
    MODEL_FOLDER,
    checkpoint_folder,
    checkpoint_folders,
    export_advice,
)
from learner.training.engine import TorchEngine
from learner.training.sharded_files import Write
from protocol.faults import crash_point, slow_point
from protocol.messages import AdapterSpec

STATE_FILE = "state.json"
RANDOM_FILE = "random.pt"
CHECKSUMS_FILE = "checksums.json"


@dataclass(frozen=True)
class LearnerState:
    """Everything but tensors that a resumed run continues from."""

    step: int
    version: int
    architecture: str
    run_id: str
    adapter: dict[str, Any] | None = None
    """An AdapterSpec."""
    base: str = ""
    """Content fingerprint of the weights that the adapter belongs to."""
    controllers: dict[str, Any] = field(default_factory=dict)
    """Name -> state of each setting that adapts itself during the run."""


@dataclass(frozen=True)
class Snapshot:
    """Content of a checkpoint at its step. Files are written later, on any thread; on each rank its parts."""

    state: LearnerState
    random: torch.Tensor
    """State of torch's generator."""
    model_folder: str
    """MODEL_FOLDER or ADAPTER_FOLDER."""
    model: Write
    """Makes that folder."""
    roles: Mapping[str, Write]
    """The rest of each engine by the name of its folder; empty for the policy's, beside the others."""

    def write_files(self, building: Path) -> None:
        self.model(building / self.model_folder)
        slow_point("checkpoint.writing")
        crash_point("checkpoint.writing")
        for name, write in self.roles.items():
            (building / name).mkdir(parents=True, exist_ok=True)
            write(building / name)


def policy_files(engine: TorchEngine, processor: Any, base: str, *, copies: bool) -> tuple[str, Write]:
    """Name of the folder that a checkpoint has the policy in, and what makes it: the model, or of one with an adapter
    the adapter, which is small: all ranks gather it, and rank 0 writes it. `base`: its base weights' fingerprint."""
    spec = engine.adapter
    if spec is None:
        return MODEL_FOLDER, engine.model_files(processor, copies=copies)
    tensors = [(name, host_copy(tensor)) for name, tensor in engine.sharding.published()]

    def write(folder: Path) -> None:
        if engine.ranks.leads:
            write_adapter_folder(folder, spec, tensors, base=base, base_path=engine.facts.source)

    return ADAPTER_FOLDER, write


def make_building_folder(run_path: Path, step: int) -> Path:
    """The folder that the step's checkpoint is written into, before it is complete; what others have left is removed.

    Of several ranks rank 0 makes it, before any writes there.
    """
    folder = checkpoint_folder(run_path, step).absolute()
    for leftover in folder.parent.glob(".*.building-*"):
        shutil.rmtree(leftover)
    building = folder.with_name(f".{folder.name}.building-{os.getpid()}")
    building.mkdir(parents=True)
    return building


def save_checkpoint(run_path: Path, building: Path, snapshot: Snapshot, keep: int) -> Path:
    """Write the step's checkpoint and remove all but the newest `keep`. Its model folder is a Hugging Face folder.

    Raises BadStateError where there is no room for it; nothing of it is then left.
    """
    state = snapshot.state
    folder = checkpoint_folder(run_path, state.step)
    try:
        _write(building, snapshot)
    except Exception as problem:
        shutil.rmtree(building, ignore_errors=True)
        if not is_disk_full(problem):
            raise
        # Libraries do not say which file had no room.
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
        raise BadStateError(f"the checkpoint of step {state.step} could not be written ({problem})") from full
    shutil.rmtree(folder, ignore_errors=True)
    building.rename(folder)
    _sync(folder.parent)
    crash_point("checkpoint.renamed")
    until_now = [path for step, path in complete_checkpoints(run_path).items() if step <= state.step]  # a later one
    for old in until_now[:-keep]:  # was damaged, and this run has gone on from one before it
        shutil.rmtree(old)
    return folder


def _write(building: Path, snapshot: Snapshot) -> None:
    """Write all files of a checkpoint, and bring them to the disk."""
    snapshot.write_files(building)
    torch.save(snapshot.random, building / RANDOM_FILE)
    (building / STATE_FILE).write_text(json.dumps(asdict(snapshot.state), indent=2), encoding="utf-8")
    write_checksums(building)
    for path in building.rglob("*"):
        if path.is_file():
            _sync(path)


def complete_checkpoints(run_path: Path) -> dict[int, Path]:
    """Step -> folder, oldest first."""
    return {step: path for step, path in checkpoint_folders(run_path).items() if (path / STATE_FILE).is_file()}


def newest_checkpoint(run_path: Path) -> Path | None:
    return next(reversed(complete_checkpoints(run_path).values()), None)


class DamagedCheckpoint(BadStateError):
    """A file of a checkpoint is missing, or is not what was written."""

    def __init__(self, folder: Path, problem: str):
        super().__init__(
            f"the checkpoint {folder} cannot be used: {problem}. Restore it from a backup, or start a new run from "
            "an older one's model (asyncrl export RUN TARGET --checkpoint STEP, then model.path=TARGET)"
        )
        self.folder, self.problem = folder, problem


def read_state(folder: Path) -> LearnerState:
    """Raises BadStateError unless every file of the checkpoint is as it was written; DamagedCheckpoint where one is
    not, or is missing."""
    check_files(folder)
    try:
        return LearnerState(**json.loads((folder / STATE_FILE).read_text(encoding="utf-8")))
    except (ValueError, TypeError) as problem:
        raise BadStateError(
            f"{folder / STATE_FILE} is not of this version of asyncrl ({problem}). Resume with the one that wrote it"
        ) from problem


def check_adapter(folder: Path, state: LearnerState, adapter: AdapterSpec | None, base: str) -> None:
    """Raises UserError unless the checkpoint has such an adapter, for these base weights. Nothing is loaded yet."""
    theirs = AdapterSpec.model_validate(state.adapter) if state.adapter else None
    if adapter != theirs:
        was, now = (
            f"rank {spec.rank}, alpha {spec.alpha}, {len(spec.target_modules)} layers"
            + "".join(f", {name} whole" for name in spec.modules_to_save)
            if spec
            else "none"
            for spec in (theirs, adapter)
        )
        raise UserError(
            f"--resume: {folder} was written with another model.lora: {was} there, {now} here. Resume with the run's "
            f"own config.yaml, or start a new run from it: {export_advice(folder.parent.parent, merged=bool(theirs))}"
        )
    if base != state.base:
        raise UserError(
            f"--resume: the adapter in {folder} belongs to base weights with fingerprint {state.base}; those in "
            f"model.path have {base}. Put the base model that the run was started with back"
        )


def restore_engines(folder: Path, engine: TorchEngine, others: Mapping[str, TorchEngine]) -> None:
    """Restore adapter, optimiser, the other roles' engines and the random state; a whole model was loaded from the
    checkpoint's model folder.

    Raises UserError where the checkpoint was written without one of `others`.
    """
    if missing := [name for name in others if not (folder / name).is_dir()]:
        raise UserError(
            f"--resume: {folder} was written without a {missing[0]}, which the settings ask for now. Resume with the "
            f"run's own config.yaml, or start a new run from it: {export_advice(folder.parent.parent)}"
        )
    if engine.adapter is not None:
        engine.load_published(read_adapter(folder / ADAPTER_FOLDER).items())
    engine.load(folder)
    for name, other in others.items():
        other.load(folder / name)
    torch.set_rng_state(torch.load(folder / RANDOM_FILE, weights_only=True))


def _sync(path: Path) -> None:
    """Bring a file, or a folder's list of names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_checksums(folder: Path) -> None:
    (folder / CHECKSUMS_FILE).write_text(json.dumps(_checksums(folder)), encoding="utf-8")


def check_files(folder: Path) -> None:
    """Raises DamagedCheckpoint naming the first file that is not what was written, or is missing; BadStateError for one
    that was not written with it."""
    try:
        expected, actual = json.loads((folder / CHECKSUMS_FILE).read_text(encoding="utf-8")), _checksums(folder)
        changed = sorted(name for name in expected if expected[name] != actual.get(name))
        problem = f"{changed[0]} is not what was written (checksum), or is missing" if changed else ""
        added = sorted(actual.keys() - expected.keys())
    except (OSError, ValueError, AttributeError, TypeError) as error:
        problem, added = str(error) or repr(error), []
    if problem:
        raise DamagedCheckpoint(folder, problem)
    if added:
        raise BadStateError(f"the checkpoint {folder} has a file that was not written with it: {added[0]}. Move it out")


def _checksums(folder: Path) -> dict[str, str]:
    """Path in the folder -> XXH3 of the content, of every file."""
    checksums: dict[str, str] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != CHECKSUMS_FILE:
            with path.open("rb") as file:
                checksums[path.relative_to(folder).as_posix()] = hashlib.file_digest(file, xxhash.xxh3_64).hexdigest()
    return checksums


class BackgroundWrite:
    """One piece of writing, begun at once. The thread ends with the process: what it has not finished is of no use."""

    def __init__(self, write: Callable[[], object], ended: Callable[[], None] = lambda: None):
        """`ended` is called on the thread, however the writing ends."""
        self._ended = ended
        self._error: BaseException | None = None
        self.seconds = 0.0
        """How long it took, once it is done."""
        self._done = threading.Event()
        threading.Thread(target=self._run, args=(write,), name="checkpoint", daemon=True).start()

    def _run(self, write: Callable[[], object]) -> None:
        began = time.monotonic()
        try:
            write()
        except BaseException as error:
            self._error = error
        del write  # with the copy that it has written
        self.seconds = time.monotonic() - began
        self._done.set()
        self._ended()

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def check(self) -> None:
        """Raise what went wrong, if it is done."""
        if self.is_done and self._error is not None:
            raise self._error

    def wait(self, timeout_s: float) -> None:
        """Block until it is done. Raises what went wrong, or WaitTimeoutError."""
        if not self._done.wait(timeout_s):
            raise WaitTimeoutError(f"a checkpoint was not written within {timeout_s:g} s (learner.wait_timeout_s)")
        self.check()
