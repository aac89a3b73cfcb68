"""`asyncrl import-config FILE [-o OUT]`: our YAML with the origin of each line, the account, and the reward adapter.

Their reward functions take a dictionary, or a list of them, and return one with `overall`. Ours take a RewardSample and
return a number. A short file between the two is written beside the configuration.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from asyncrl.config import yaml_text
from asyncrl.config.load import load_config
from asyncrl.config.suggest import known_paths
from asyncrl.errors import ExitCode, UserError
from asyncrl.tools.import_config.derived_rules import reward_call
from asyncrl.tools.import_config.foreign_config import read_foreign_config
from asyncrl.tools.import_config.translation import ON_POLICY, Import, Line, translate

_TITLES = {
    "taken over": "taken over, same meaning",
    "translated": "translated",
    "no counterpart": "no counterpart here",
    "unknown": "unknown: nothing was done with them",
}
_SYNCHRONOUS = "theirs generates, then trains; leave this line out to train asynchronously"
_NEEDS_ADAPTER = "reward.functions: their function is called in another way. With -o an adapter is written"


def import_config(source: Path, out: Path | None) -> int:
    """Prints the configuration, or with `out` writes it and prints the account. Exit code 2: something is missing."""
    done = translate(read_foreign_config(source))
    if out is None:
        needed = [_NEEDS_ADAPTER] if "reward.functions" in done.settings else []
        done = replace(done, missing=(*done.missing, *needed, *_problems(as_yaml(done))))
        print(as_yaml(done), end="")
    else:
        done, adapter = _with_adapter(done, out.parent / f"{out.stem}_reward.py")
        done = replace(done, missing=(*done.missing, *_problems(as_yaml(done))))
        _write({out: as_yaml(done), **adapter})
        print("\n".join([f"wrote {out}", *account(done)]))
        if not done.missing:
            print(f"it loads. Next: asyncrl doctor {out}")
    return ExitCode.USER_ERROR if done.missing else ExitCode.FINISHED


def _write(texts: Mapping[Path, str]) -> None:
    """All of these files, or none. Raises UserError where one exists already, or cannot be written."""
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


def _problems(text: str) -> list[str]:
    """What `load_config` refuses, a line each; what is known to be missing is not repeated."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(text, encoding="utf-8")
        try:
            load_config(path)
        except UserError as error:
            lines = [line.removeprefix("- ") for line in str(error).splitlines()[1:]]
            return [line.split(" [")[0] for line in lines if " is missing" not in line]
    return []


# --- YAML and account --------------------------------------------------------------------------------


def as_yaml(done: Import) -> str:
    """Loads with `load_config` as soon as nothing is missing any more."""
    lines = [
        f"# Written by `asyncrl import-config` from {' and '.join(done.theirs.sources)} ({done.theirs.framework})."
    ]
    lines += _section(_tree(done.settings), (), done)
    # What became a setting stands beside it; the account at the end has the rest.
    lines += [f"# {line}" for line in account(done, settled=False)]
    return "\n".join(lines) + "\n"


def account(done: Import, *, settled: bool = True) -> Iterator[str]:
    """Every key of theirs, by what became of it; without `settled`, those only that became no setting."""
    for verdict, title in _TITLES.items():
        chosen = [line for line in done.lines if line.outcome.verdict == verdict]
        chosen = [line for line in chosen if settled or not line.outcome.settings]
        if chosen:
            yield f"{title} ({len(chosen)})"
            yield from (f"  {_account_line(line)}" for line in chosen)
    if done.missing:
        yield f"still to be given ({len(done.missing)})"
        yield from (f"  {text}" for text in done.missing)


def _account_line(line: Line) -> str:
    settings = ", ".join(f"{key}={_short(value)}" for key, value in line.outcome.settings.items())
    text = line.outcome.text
    return "  ".join(filter(None, [_origin(line), settings and f"-> {settings}", text and f"({text})"]))


def _origin(line: Line) -> str:
    return f"{line.key}: {_short(line.value)}" + (" [their default]" if line.is_default else "")


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    text = " ".join(text.split())
    return text if len(text) <= 80 else f"{text[:77]}..."


def _tree(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Nested, in the order of the schema."""
    known = [path.split(".N.")[0] for path in known_paths()]

    def place(key: str) -> int:
        return next((i for i, path in enumerate(known) if key == path or key.startswith(path + ".")), len(known))

    tree: dict[str, Any] = {}
    for key in sorted(settings, key=place):
        inner = tree
        *parents, name = key.split(".")
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[name] = settings[key]
    return tree


def _section(tree: Mapping[str, Any], path: tuple[str, ...], done: Import) -> Iterator[str]:
    indent = "  " * len(path)
    for key, value in tree.items():
        place = (*path, key)
        if isinstance(value, dict):
            yield f"{indent}{key}:"
            yield from _section(value, place, done)
        else:
            yield f"{indent}{_setting(key, value)}  # {_comment('.'.join(place), done)}"


def _comment(ours: str, done: Import) -> str:
    if ours == ON_POLICY:
        return _SYNCHRONOUS
    line = done.origin(ours)
    assert line is not None, ours
    return _origin(line) + (f"; {line.outcome.text}" if line.outcome.text else "")


def _setting(key: str, value: Any) -> str:
    if isinstance(value, list) or (isinstance(value, str) and "\n" in value):
        return f"{key}: {json.dumps(value, ensure_ascii=False)}"
    return yaml_text.write({key: value}).rstrip()


# --- the adapter of their reward function ---------------------------------------------------------------

_ADAPTER = '''"""Calls {function}
as RLLaVA and EasyR1 call it. Written by `asyncrl import-config`.

A further component is a line in `reward.functions`, with weight 0 if it is only to be seen:
    {{function: {name}:component, name: accuracy, weight: 0, kwargs: {{key: accuracy}}}}
"""

from __future__ import annotations

from typing import Any

from asyncrl.rewards.sample import RewardSample
from asyncrl.rewards.spec import load_reward

theirs = load_reward({function!r})


def overall(sample: RewardSample, **kwargs: Any) -> float:
    return component(sample, "overall", **kwargs)


def component(sample: RewardSample, key: str, **kwargs: Any) -> float:
    # `response_length` (in tokens) is not known here: a function that asks for it fails, and is counted as failed.
    row = {{"response": sample.completion, "ground_truth": sample.answer}}
    {call}
    return float(scores[key])
'''
_CALLS = {
    "batch": "[scores] = theirs([row], **kwargs)",
    "sequential": "scores = theirs(row, **kwargs)",
    "pair": 'scores = theirs(row["response"], row["ground_truth"], **kwargs)',
    "": (
        'batch = theirs.__globals__.get("REWARD_TYPE", "batch") == "batch"  # how its file says that it is called\n'
        "    scores = theirs([row], **kwargs)[0] if batch else theirs(row, **kwargs)"
    ),
}


def _with_adapter(done: Import, path: Path) -> tuple[Import, dict[Path, str]]:
    """Puts `path` in the place of their reward function, if they name one. Returns the text of that file, too."""
    entries = done.settings.get("reward.functions")
    if not entries:
        return done, {}
    [entry] = entries
    call = _CALLS[reward_call(done.theirs.values)]
    text = _ADAPTER.format(function=entry["function"], name=path, call=call)
    functions = [{**entry, "function": f"{path}:overall"}]
    return replace(done, settings={**done.settings, "reward.functions": functions}), {path: text}
