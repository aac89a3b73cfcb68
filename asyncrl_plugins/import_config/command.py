"""`asyncrl import-config FILE [-o OUT]`: our YAML, and the account of their keys."""

from __future__ import annotations

import re
import shlex
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asyncrl.config import yaml_text
from asyncrl.errors import ExitCode, UserError, file_hint
from asyncrl.user_functions import shorten
from asyncrl_plugins.import_config.table import TranslatedKey, Translation, recognise, translate


def run(arguments: Namespace) -> int:
    """Write or print the translation. Exit code 2: a key is not translated."""
    source, out = arguments.source, arguments.out
    done = read_and_translate(source)
    text = as_yaml(done)
    if out is None:
        print(text, end="")
        print(account(done), file=sys.stderr)
    else:
        _write(out, text)
        print(f"wrote {out}\n\n{account(done)}")
    return ExitCode.USER_ERROR if done.not_translated else ExitCode.FINISHED


def read_and_translate(path: Path) -> Translation:
    """Translate a configuration file. Raises UserError for one that is not read."""
    if not path.is_file():
        raise UserError(f"there is no file {path}: {file_hint(path)}")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}. Name a resolved configuration in YAML or JSON") from None
    if is_script(path, text):
        raise UserError(
            f"{path} is a script, which is not read: its variables and arrays are the shell's. One of verl that hands "
            f"its arguments on prints what it would run: bash {shlex.quote(str(path))} --cfg job --resolve > "
            "theirs.yaml. Name that file; of EasyR1 and RLLaVA the YAML file that the script names, of TRL that of "
            "--config"
        )
    config, _ = yaml_text.parse(text, str(path))
    if not isinstance(config, dict):
        raise UserError(f"{path} holds no configuration. Name a resolved one, in YAML or JSON")
    return translate(config, recognise(config, path))


def is_script(path: Path, text: str) -> bool:
    """Whether a file is for the shell: by its name, its first line, or a line that runs a program."""
    runs = re.search(r"^\s*(?:python3?|torchrun|accelerate|trl|bash)[ \t]+[-\w./\"$]", text, re.MULTILINE)
    return path.suffix in (".sh", ".bash") or text.startswith("#!") or runs is not None


def as_yaml(done: Translation) -> str:
    """Return our configuration as YAML."""
    sections: dict[str, Any] = {}
    for name, value in done.settings.items():
        *above, last = name.split(".")
        section = sections
        for part in above:
            section = section.setdefault(part, {})
        section[last] = value
    return yaml_text.write(sections)


def account(done: Translation) -> str:
    """Return the lists of keys: translated, left out, not translated."""
    parts = [
        *_listed(f"translated from {done.table.framework}", done.translated),
        *_listed(f"defaults of {done.table.framework} that the file leaves out", done.defaults),
        *_listed("left out, as they change speed, memory or bookkeeping, or ask for what is done here", done.left_out),
        *_listed("NOT TRANSLATED: set by hand what counts", done.not_translated),
        "differences that no key says:",
        *(f"  {line}" for line in done.table.about.splitlines()),
    ]
    return "\n".join(parts)


def _listed(title: str, keys: Sequence[TranslatedKey]) -> list[str]:
    return [f"{title}:", *(f"  {_line(key)}" for key in keys), ""] if keys else []


def _line(key: TranslatedKey) -> str:
    ours = ", ".join(f"{name}={shorten(str(value), 60)}" for name, value in key.settings.items())
    return (
        f"{key.key}: {shorten(str(key.value), 60)}"
        + (f" -> {ours}" if ours else "")
        + (f"  ({key.note})" if key.note else "")
    )


def _write(path: Path, text: str) -> None:
    if path.exists():
        raise UserError(f"{path} exists already. Name another file with -o")
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}. Name another file with -o") from None
