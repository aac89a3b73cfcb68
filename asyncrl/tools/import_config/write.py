"""`asyncrl import-config FILE [-o OUT]`: our YAML, the account of their keys, and the reward adapter.

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
from asyncrl.config.load import load_config
from asyncrl.config.schema import RunConfig
from asyncrl.errors import ExitCode, UserError
from asyncrl.tools.import_config.environments import adapter_of
from asyncrl.tools.import_config.foreign_config import read_foreign_config
from asyncrl.tools.import_config.translation import Import, Line, translate
from asyncrl.user_functions import shorten

_TITLES = {
    "taken over": "taken over, same meaning",
    "translated": "translated",
    "lost": "LOST: without these the run is another one",
    "no counterpart": "no counterpart here",
    "unknown": "unknown: nothing was done with them",
}


def import_config(source: Path, out: Path | None, *, accept_losses: bool = False) -> int:
    """Print the configuration, or with `out` write it and print the account. Exit code 2: something is missing, or an
    algorithm, a role or a precision is lost and that is not accepted."""
    done = translate(read_foreign_config(source))
    needed: list[str] = []
    adapters: dict[Path, str] = {}
    calls_ours = done.theirs.framework == "TRL"  # lists of one completion, as there
    if out is not None and not calls_ours:
        done, adapters = _with_adapter(done, out.parent / f"{out.stem}_reward.py")
        done, asked = _with_environment(done, out.parent / f"{out.stem}_environment.py")
        adapters |= asked
    elif "reward.functions" in done.settings and not calls_ours:
        needed = ["reward.functions: their function is called in another way. With -o an adapter is written"]
    if out is None and "environment.name" in done.settings:
        needed.append("environment.name: their class is asked in another way. With -o an adapter is written")
    done = replace(done, missing=(*done.missing, *needed, *_problems(as_yaml(done))))
    if out is None:
        print(as_yaml(done), end="")
    else:
        _write({out: as_yaml(done), **adapters})
        print("\n".join([f"wrote {out}", *account(done)]))
        if not done.missing and (accept_losses or not done.lost):
            print(f"it loads. Next: asyncrl doctor {out}")
    if done.lost and not accept_losses:
        keys = ", ".join(f"{line.key}={_short(line.value)}" for line in done.lost)
        raise UserError(
            f"this would be another run: {keys} {'are' if len(done.lost) > 1 else 'is'} lost, each with the reason "
            "above. Set what can be set in its place, or say that it may go: --accept-losses"
        )
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
    """Errors that load_config reports, except known missing keys."""
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
    """YAML of the imported settings; the report follows as comments."""
    sources = " and ".join(done.theirs.sources)
    nested: dict[str, Any] = dict.fromkeys(RunConfig.model_fields)
    for key, value in done.settings.items():
        nested = yaml_text.put(nested, tuple(key.split(".")), value)
    given = {section: value for section, value in nested.items() if value is not None}
    title = f"Written by `asyncrl import-config` from {sources} ({done.theirs.framework})."
    comments = (f"# {line}".replace("\n", " ") for line in (title, *account(done)))
    return yaml_text.write(given) + "\n".join(comments) + "\n"


def account(done: Import) -> Iterator[str]:
    """Report of every key by outcome."""
    for verdict, title in _TITLES.items():
        chosen = [line for line in done.lines if line.outcome.verdict == verdict]
        if chosen:
            yield f"{title} ({len(chosen)})"
            yield from (f"  {_account_line(line)}" for line in chosen)
    if done.missing:
        yield f"still to be given ({len(done.missing)})"
        yield from (f"  {text}" for text in done.missing)


def _account_line(line: Line) -> str:
    origin = f"{line.key}: {_short(line.value)}" + (" [their default]" if line.is_default else "")
    settings = ", ".join(f"{key}={_short(value)}" for key, value in line.outcome.settings.items())
    text = line.outcome.text
    return "  ".join(filter(None, [origin, settings and f"-> {settings}", text and f"({text})"]))


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return shorten(" ".join(text.split()), limit=80)


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
    row = {{"response": sample.completion, "response_length": sample.num_tokens, "ground_truth": sample.answer}}
    {call}
    return float(scores[key])
'''
_CALLS = {
    "batch": "[scores] = theirs([row], **kwargs)",
    "sequential": "scores = theirs(row, **kwargs)",
    "function": 'scores = theirs(row["response"], row["ground_truth"], **kwargs)',
    "verl": 'found = theirs(data_source="", solution_str=row["response"], ground_truth=row["ground_truth"], '
    "extra_info={}, **kwargs)\n"
    '    scores = {**found, "overall": found["score"]} if isinstance(found, dict) else {"overall": found}',
    "as its file says": 'batch = theirs.__globals__.get("REWARD_TYPE", "batch") == "batch"\n'
    "    scores = theirs([row], **kwargs)[0] if batch else theirs(row, **kwargs)",
}
"""How a function of each of their reward types is called."""


def _with_adapter(done: Import, path: Path) -> tuple[Import, dict[Path, str]]:
    """Replace the foreign reward function, if any, by an adapter at `path`; also returns the adapter's text."""
    entries = done.settings.get("reward.functions")
    if not entries:
        return done, {}
    entry, *others = entries
    theirs = done.theirs.values
    kind = "function" if theirs.get("reward.score_function") else str(theirs.get("reward.reward_type"))
    call = _CALLS.get(kind, _CALLS["as its file says"])
    text = _ADAPTER.format(function=entry["function"], name=path, call=call)
    functions = [{**entry, "function": f"{path}:overall"}, *others]
    return replace(done, settings={**done.settings, "reward.functions": functions}), {path: text}


def _with_environment(done: Import, path: Path) -> tuple[Import, dict[Path, str]]:
    """Replace the foreign environment, if any, by an adapter at `path`; also returns the adapter's text."""
    name = done.settings.get("environment.name")
    if not name:
        return done, {}
    earns = done.theirs.values.get("reward.reward_type") == "env"
    settings = {**done.settings, "environment.name": f"{path}:Theirs"}
    return replace(done, settings=settings), {path: adapter_of(name, earns=earns)}
