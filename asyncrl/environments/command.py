"""`asyncrl env`: play an episode, estimate what a policy gets, write the rows of a data set.

Handlers import what they need: `asyncrl --help` is instant.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.errors import UserError

if TYPE_CHECKING:
    from asyncrl.config.environment import EnvironmentConfig
    from asyncrl.environments.interface import Start
    from asyncrl.environments.loading import LoadedEnvironment


def add_commands(commands: argparse._SubParsersAction) -> None:
    """Add `env` with its three commands."""
    env = commands.add_parser("env", help="environments of several turns: play one, estimate a baseline, write rows")
    kinds = env.add_subparsers(required=True, metavar="COMMAND")
    for name, handler, help in (
        ("try", _try, "play one episode in the terminal: by hand, --policy oracle, or --model FOLDER"),
        ("baseline", _baseline, "mean reward of one of the environment's own policies over many episodes"),
        ("rows", _rows, "write a data set of the environment's rows, as Parquet"),
    ):
        one = kinds.add_parser(name, help=help, description=help[0].upper() + help[1:] + ".")
        one.add_argument("name", metavar="FILE:CLASS", help="or a YAML file with the section `environment`")
        one.add_argument("overrides", nargs="*", metavar="key=value", help="of the section, such as limits.turns=3")
        one.add_argument("--seed", type=int, default=0, help="of rows, episodes and policy")
        one.add_argument("--split", default="train", help="part of the environment's rows; default: train")
        one.set_defaults(handler=handler)
        if name == "rows":
            one.add_argument("--count", type=int, default=1000)
            one.add_argument("--out", type=Path, required=True, metavar="FILE")
            continue
        one.add_argument("--policy", default="" if name == "try" else "random", help="oracle, random, ...")
        one.add_argument("--unit", type=int, default=28, help="pixels at the side of an image token")
        if name == "try":
            row = "row of the YAML file's data.train_files, from 0; it is row 0 where the environment makes none"
            one.add_argument("--row", type=int, metavar="N", help=row)
            model = "a Hugging Face or PEFT folder plays, by the engine and limits of a run and evaluation.temperature"
            one.add_argument("--model", type=Path, metavar="FOLDER", help=model)
        if name == "baseline":
            one.add_argument("--episodes", type=int, default=400)


def _config(arguments: argparse.Namespace) -> EnvironmentConfig:
    from asyncrl.config.environment import is_file, load_environment, override

    if is_file(arguments.name):
        return load_environment(Path(arguments.name), arguments.overrides)
    return override({"name": arguments.name}, arguments.overrides)


def _start(arguments: argparse.Namespace, loaded: LoadedEnvironment) -> Start:
    from asyncrl.config.environment import is_file, load_data
    from asyncrl.environments import play

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
    import asyncio
    import tempfile

    from asyncrl.environments import play
    from asyncrl.environments.call_formats import example_call
    from asyncrl.environments.terminal import Terminal, typed_turns

    config = _config(arguments)
    loaded = play.open_environment(config, arguments.unit)
    if arguments.model is not None:
        from asyncrl.launch.played_by_model import try_model

        return try_model(arguments, config, loaded)
    start = _start(arguments, loaded)
    turns = typed_turns()
    if arguments.policy:
        turns = play.policy_of(loaded, arguments.policy)(start, random.Random(arguments.seed))
    folder = Path(tempfile.mkdtemp(prefix="asyncrl-env-"))
    print(f"{loaded.cls.__name__}, calls as {loaded.call_format}, at most {config.limits.turns} turns")
    for tool in loaded.tools.values():
        print(f"  tool {tool.name}({', '.join(tool.parameters.get('properties', {}))}): {tool.description}")
    if loaded.tools:
        print(f"  a call: {example_call(loaded.call_format, loaded.schemas)}")
    show = Terminal(folder, arguments.unit)
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
    from asyncrl.environments import play

    config = _config(arguments)
    loaded = play.open_environment(config, arguments.unit)
    policy = play.policy_of(loaded, arguments.policy)
    print(f"{loaded.cls.__name__}, policy {arguments.policy}, ", end="", flush=True)
    print(play.baseline(loaded, config, policy, arguments.episodes, arguments.seed, arguments.split))
    return 0


def _rows(arguments: argparse.Namespace) -> int:
    from asyncrl.environments import play

    if arguments.count < 1:
        raise UserError(f"--count is {arguments.count}, expected at least 1")
    if arguments.out.suffix.lower() != ".parquet":  # a run reads a file by its ending
        raise UserError(
            f"--out is {arguments.out}: the rows are written as Parquet. Name it {arguments.out.stem}.parquet"
        )
    loaded = play.open_environment(_config(arguments), 28)
    if not hasattr(loaded.cls, "make_row"):
        raise UserError(
            f"{loaded.cls.__name__} makes no rows of its own: give it a class method make_row(index, split)"
        )
    import pyarrow as pa
    import pyarrow.parquet as pq

    first = arguments.seed * 1_000_000
    # A run reads a column of answers, also where the environment alone judges.
    rows = [{"answer": "", **play.make_row(loaded, first + index, arguments.split)} for index in range(arguments.count)]
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), arguments.out)
    print(f"{arguments.out}: {len(rows)} rows")
    return 0
