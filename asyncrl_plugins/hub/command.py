"""`asyncrl export RUN [TARGET] --push ORG/NAME`, `--card FILE`, `--private`."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from asyncrl.config.load import load_config
from asyncrl.errors import ExitCode, UserError
from asyncrl.model_files.folder import ADAPTER_CONFIG
from asyncrl.run_folder.contents import EXPORT_FOLDER, checkpoint_folders, policy_folder
from asyncrl.run_folder.export_record import read_record
from asyncrl.telemetry.jsonl import write_atomically
from asyncrl.telemetry.recorder import CONFIG_FILE, is_finished
from asyncrl_plugins.hub.card import Exported, model_card
from asyncrl_plugins.hub.sources import hub_model
from asyncrl_plugins.hub.upload import CARD, send

REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
MADE_OF = ".asyncrl_export_of.json"
"""File in a folder that --push made: another call takes the folder as it is if it is of the same checkpoint."""


def push(arguments: argparse.Namespace) -> int:
    """Export, and send the export with its card. Raises UserError."""
    repository, card = arguments.push, arguments.card
    if not REPOSITORY.fullmatch(repository):
        raise UserError(
            f"--push is {repository!r}: expected the name of a repository on the hub, such as my-org/my-model"
        )
    if card and not card.is_file():
        raise UserError(f"--card is {card}, and there is no such file. With --push it names a card that is there")
    folder = _exported_folder(arguments)
    exported = _described(arguments, folder, repository)
    text = card.read_text(encoding="utf-8") if card else model_card(exported)
    if exported.is_adapter and not hub_model(exported.config.model):
        print(f"note: {ADAPTER_CONFIG} names its base as {exported.config.model.path}, a folder of this machine")
    step = "" if exported.step is None else f", step {exported.step}"
    run = Path(arguments.run_dir).absolute().name
    print(f"pushed: {send(folder, text, repository, f'asyncrl run {run}{step}', private=arguments.private)}")
    return ExitCode.FINISHED


def write_card(arguments: argparse.Namespace) -> int | None:
    """Write the card, and the export before it where TARGET is given. Raises UserError."""
    if arguments.push:
        return None
    if arguments.card.exists():
        raise UserError(f"--card is {arguments.card}, which exists already. Name a new file")
    if arguments.target is not None:
        arguments.handler(arguments)
    text = model_card(_described(arguments, arguments.target))
    write_atomically(arguments.card, text.encode())
    print(f"card: {arguments.card}")
    return ExitCode.FINISHED


def check_private(arguments: argparse.Namespace) -> None:
    if not arguments.push:
        raise UserError("--private is about a repository that --push makes: add --push ORG/NAME")


def _exported_folder(arguments: argparse.Namespace) -> Path:
    """TARGET, made now or by an earlier call of the same; without TARGET the end product of a finished run."""
    run, target = arguments.run_dir, arguments.target
    if target is None:
        chosen = arguments.checkpoint is not None or arguments.adapter or arguments.merged
        if chosen or not (run / EXPORT_FOLDER).is_dir() or not is_finished(run):
            raise UserError(
                f"{run} is not finished, or another form of it is asked for than its export/. Name a new folder for "
                "it: asyncrl export RUN TARGET --push ORG/NAME"
            )
        return run / EXPORT_FOLDER
    made_of = _made_of(arguments)
    if target.exists():
        if not (target / MADE_OF).is_file() or json.loads((target / MADE_OF).read_bytes()) != made_of:
            raise UserError(
                f"{target} exists already, and no `asyncrl export --push` of this checkpoint made it. Name a new folder"
            )
        print(f"{target} is there, of this checkpoint: it is sent as it is")
        return target
    arguments.handler(arguments)
    write_atomically(target / MADE_OF, json.dumps(made_of).encode())
    return target


def _made_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Files of the checkpoint with their sizes and times, and the form that was asked for."""
    source = policy_folder(arguments.run_dir, arguments.checkpoint)
    files = {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in sorted(source.iterdir())}
    form = "merged" if arguments.merged else "adapter" if arguments.adapter else ""
    return {"source": str(source.absolute()), "files": files, "form": form}


def _described(arguments: argparse.Namespace, folder: Path | None, repository: str = "") -> Exported:
    """The export in `folder`, or the one that would be made where there is none."""
    run = arguments.run_dir
    if not (run / CONFIG_FILE).is_file():
        raise UserError(f"{run} has no {CONFIG_FILE}: there is nothing to make a card of. Name the run_dir of a run")
    source = policy_folder(run, arguments.checkpoint)
    config, record = load_config(run / CONFIG_FILE, []), read_record(folder) if folder else None
    is_adapter = ((folder or source) / ADAPTER_CONFIG).is_file()
    if folder is None and is_adapter:
        rounded = config.rollout.quantization or config.model.quantization
        would_merge = config.model.dtype == "float32" and not rounded
        is_adapter = not (arguments.merged or (would_merge and not arguments.adapter))
    steps = [step for step, path in checkpoint_folders(run).items() if path == source.parent]
    return Exported(
        run=run,
        config=config,
        step=steps[0] if steps else None,
        is_adapter=is_adapter,
        dtype=record.dtype if record else config.model.dtype,
        record=record,
        repository=repository,
        page=_page_of(folder) if config.model.quantization else "",
    )


def _page_of(folder: Path | None) -> str:
    """README.md that an export has of its own, of an adapter on a quantised base; empty where there is none."""
    page = folder / CARD if folder else None
    return page.read_text(encoding="utf-8") if page and page.is_file() else ""
