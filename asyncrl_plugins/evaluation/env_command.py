"""`asyncrl env`: play an episode, estimate the reward of a policy, write the rows of a data set."""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
from pathlib import Path

from asyncrl.config.environment import EnvironmentConfig
from asyncrl.environments.interface import Start
from asyncrl.environments.loading import LoadedEnvironment
from asyncrl.errors import UserError
from asyncrl_plugins.evaluation import play
from asyncrl_plugins.evaluation.demonstrations import demonstrations
from asyncrl_plugins.evaluation.environment_files import is_file, load_data, load_environment, override
from asyncrl_plugins.evaluation.terminal import Terminal, by_unit, typed_turns

UNIT = 28
"""Pixels at the side of an image token of Qwen2-VL and Qwen2.5-VL."""


def run_env(arguments: argparse.Namespace) -> int:
    """Run `try`, `baseline` or `rows`."""
    return {"try": _try, "baseline": _baseline, "rows": _rows}[arguments.kind](arguments)


def _config(arguments: argparse.Namespace) -> EnvironmentConfig:
    if is_file(arguments.name):
        return load_environment(Path(arguments.name), arguments.overrides)
    return override({"name": arguments.name}, arguments.overrides)


def _start(arguments: argparse.Namespace, loaded: LoadedEnvironment) -> Start:
    data = load_data(Path(arguments.name)) if is_file(arguments.name) else None
    if arguments.row is not None and data is None:
        raise UserError(
            f"--row is one of data.train_files, and {arguments.name} is no YAML file with the section `data`"
        )
    if data is None or (arguments.row is None and hasattr(loaded.cls, "make_row")):
        row = play.make_row(loaded, arguments.seed, arguments.split)
        return play.start_of(loaded, row, arguments.seed)
    return play.start_of_data(loaded, data, arguments.row or 0, arguments.seed)


def _try(arguments: argparse.Namespace) -> int:
    config = _config(arguments)
    loaded = play.open_environment(config, arguments.unit or UNIT)
    if arguments.model is not None:
        if arguments.unit is not None:
            raise UserError("--unit and --model both say what an image token is: leave --unit out")
        from asyncrl_plugins.evaluation.played_by_model import try_model

        return try_model(arguments, config, loaded)
    start = _start(arguments, loaded)
    turns = typed_turns()
    if arguments.policy:
        turns = play.policy_of(loaded, arguments.policy)(start, random.Random(arguments.seed))
    folder = Path(tempfile.mkdtemp(prefix="asyncrl-env-"))
    print(f"{loaded.cls.__name__}, at most {config.limits.turns} turns")
    if loaded.tools:
        for schema in loaded.tools.schemas:
            tool = schema["function"]
            parameters = ", ".join(tool["parameters"].get("properties", {}))
            print(f"  tool {tool['name']}({parameters}): {tool['description']}")
        print(f"  a call: {loaded.tools.example}")
    show = Terminal(folder, by_unit(arguments.unit or UNIT))
    for message in start.messages:
        show(message["role"], message["content"])
    for image in start.images:
        show("user", image)
    played = asyncio.run(play.play(loaded, config, start, turns, show))
    if played.close_error:
        print(f"close: {played.close_error}   a run counts the failure, and keeps the reward")
    if played.end.startswith("environment_"):
        print(f"end: {played.end}   no reward: a run leaves such a trajectory out")
        return 1
    over = f" (over_limit: {config.over_limit})" if played.end.startswith("limit") else ""
    print(f"end: {played.end}{over}   reward {sum(played.rewards):g} in {len(played.rewards)} turns   {played.why}")
    return 1 if played.close_error else 0


def _baseline(arguments: argparse.Namespace) -> int:
    config = _config(arguments)
    loaded = play.open_environment(config, arguments.unit or UNIT)
    policy = play.policy_of(loaded, arguments.policy)
    print(f"{loaded.cls.__name__}, policy {arguments.policy}, ", end="", flush=True)
    print(play.baseline(loaded, config, policy, arguments.episodes, arguments.seed, arguments.split))
    return 0


def _rows(arguments: argparse.Namespace) -> int:
    if arguments.count < 1:
        raise UserError(f"--count is {arguments.count}, expected at least 1")
    if arguments.out.suffix.lower() != ".parquet":  # a run reads a file by its ending
        raise UserError(
            f"--out is {arguments.out}: the rows are written as Parquet. Name it {arguments.out.stem}.parquet"
        )
    loaded = play.open_environment(_config(arguments), arguments.unit or UNIT)
    if not hasattr(loaded.cls, "make_row"):
        raise UserError(
            f"{loaded.cls.__name__} makes no rows of its own: give it a class method make_row(index, split)"
        )
    import pyarrow as pa
    import pyarrow.parquet as pq

    first = arguments.seed * 1_000_000
    numbers = range(first, first + arguments.count)
    if arguments.policy:
        rows = list(demonstrations(loaded, _config(arguments), arguments.policy, numbers, arguments.split))
    else:
        rows = [play.make_row(loaded, number, arguments.split) for number in numbers]
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), arguments.out)
    print(f"{arguments.out}: {len(rows)} rows")
    return 0
