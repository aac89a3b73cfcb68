"""`asyncrl import-config FILE [-o OUT]`."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from asyncrl.config.load import load_config
from asyncrl.errors import ExitCode, UserError
from asyncrl.tools.import_config.adapter import adapter_text
from asyncrl.tools.import_config.derived import reward_call
from asyncrl.tools.import_config.foreign_config import read_theirs
from asyncrl.tools.import_config.importing import Import, translate
from asyncrl.tools.import_config.writing import account, as_yaml


def import_config(source: Path, out: Path | None) -> int:
    """Prints the configuration, or with `out` writes it and prints the account. Exit code 2: something is missing."""
    done = translate(read_theirs(source))
    if out is None:
        done = replace(done, missing=(*done.missing, *_adapter_needed(done), *_problems(as_yaml(done))))
        print(as_yaml(done), end="")
    else:
        done, adapter = _with_adapter(done, out.parent / f"{out.stem}_reward.py")
        done = replace(done, missing=(*done.missing, *_problems(as_yaml(done))))
        _write({out: as_yaml(done), **adapter})
        print("\n".join([f"wrote {out}", *account(done)]))
        if not done.missing:
            print(f"it loads. Next: asyncrl doctor {out}")
    return ExitCode.USER_ERROR if done.missing else ExitCode.FINISHED


def _with_adapter(done: Import, path: Path) -> tuple[Import, dict[Path, str]]:
    """Names the file between their reward function and ours in the settings; with its text, if one is needed."""
    entries = done.settings.get("reward.functions")
    if not entries:
        return done, {}
    [entry] = entries
    text = adapter_text(entry["function"], path, reward_call(done.theirs.values))
    functions = [{**entry, "function": f"{path}:overall"}]
    return replace(done, settings={**done.settings, "reward.functions": functions}), {path: text}


def _write(texts: Mapping[Path, str]) -> None:
    """All of these files, or none. Raises UserError where one is there already, or cannot be written."""
    begun: list[Path] = []
    for path, text in texts.items():
        try:
            with path.open("x", encoding="utf-8") as file:
                begun.append(path)
                file.write(text)
        except OSError as problem:
            for unfinished in begun:
                with suppress(OSError):
                    unfinished.unlink()
            exists = isinstance(problem, FileExistsError)
            what = f"{path} exists already" if exists else f"cannot write {path}: {problem.strerror}"
            raise UserError(f"{what}. Name another file with -o") from None


def _adapter_needed(done: Import) -> list[str]:
    needed = "reward.functions" in done.settings
    return (
        ["reward.functions: their function is called in another way. With -o an adapter is written"] if needed else []
    )


def _problems(text: str) -> list[str]:
    """What `load_config` says to it, a line each; what is already known to be missing does not come twice."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(text, encoding="utf-8")
        try:
            load_config(path)
        except UserError as error:
            lines = [line.removeprefix("- ") for line in str(error).splitlines()[1:]]
            return [line.split(" [")[0] for line in lines if " is missing" not in line]
    return []
