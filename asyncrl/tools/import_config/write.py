"""`asyncrl import-config FILE [-o OUT]`: our YAML with the origin of each line, the account, and the reward adapter.

Their reward functions take a dictionary, or a list of them, and return one with `overall`. Ours take a RewardSample and
return a number. A short file between the two is written beside the configuration.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from asyncrl.config import yaml_text
from asyncrl.config.keys import all_keys
from asyncrl.config.load import load_config
from asyncrl.errors import ExitCode, UserError
from asyncrl.tools.import_config.foreign_config import read_foreign_config
from asyncrl.tools.import_config.translation import Import, Line, translate

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
    """Raises UserError where one of these files exists already, before any is written."""
    for path in texts:
        if path.exists():
            raise UserError(f"{path} exists already. Name another file with -o")
    for path, text in texts.items():
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}. Name another file with -o") from None


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
    sources = " and ".join(done.theirs.sources)
    lines = [f"# Written by `asyncrl import-config` from {sources} ({done.theirs.framework})."]
    lines += _settings(done)
    # What became a setting stands beside it; the account at the end has the rest.
    lines += [f"# {line}" for line in account(done, settled=False)]
    return "\n".join(lines) + "\n"


def _settings(done: Import) -> Iterator[str]:
    """Lines of YAML in the order of the schema, each with the key of theirs that it comes from."""
    known = [path.split(".N.")[0] for path in all_keys()]

    def place(key: str) -> int:
        return next((i for i, path in enumerate(known) if key == path or key.startswith(path + ".")), len(known))

    above: list[str] = []
    for key in sorted(done.settings, key=place):
        *sections, name = key.split(".")
        for depth, section in enumerate(sections):
            if above[: depth + 1] != sections[: depth + 1]:
                yield f"{'  ' * depth}{section}:"
        above, value = sections, done.settings[key]
        if isinstance(value, list) or (isinstance(value, str) and "\n" in value):
            text = f"{name}: {json.dumps(value, ensure_ascii=False)}"
        else:
            text = yaml_text.write({name: value}).rstrip()
        line = next((line for line in done.lines if key in line.outcome.settings), None)
        comment = "; ".join(filter(None, [_origin(line), line.outcome.text])) if line else _SYNCHRONOUS
        yield f"{'  ' * len(sections)}{text}  # {comment}"


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
    "function": 'scores = theirs(row["response"], row["ground_truth"], **kwargs)',
}
"""How a function of each of their reward types is called."""
_CALL_AS_ITS_FILE_SAYS = """\
batch = theirs.__globals__.get("REWARD_TYPE", "batch") == "batch"  # how its file says that it is called
    scores = theirs([row], **kwargs)[0] if batch else theirs(row, **kwargs)"""


def _with_adapter(done: Import, path: Path) -> tuple[Import, dict[Path, str]]:
    """Puts `path` in the place of their reward function, if they name one. Returns the text of that file, too."""
    entries = done.settings.get("reward.functions")
    if not entries:
        return done, {}
    [entry] = entries
    theirs = done.theirs.values
    kind = "function" if theirs.get("reward.score_function") else str(theirs.get("reward.reward_type"))
    call = _CALLS.get(kind, _CALL_AS_ITS_FILE_SAYS)
    text = _ADAPTER.format(function=entry["function"], name=path, call=call)
    functions = [{**entry, "function": f"{path}:overall"}]
    return replace(done, settings={**done.settings, "reward.functions": functions}), {path: text}
