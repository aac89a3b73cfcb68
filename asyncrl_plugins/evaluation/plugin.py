"""Descriptions of the commands `asyncrl eval` and `asyncrl env`, and of the scores that other plug-ins ask for."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path

from asyncrl.plugins import Command, Part


def _add_eval_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder, or a PEFT folder")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write each completion with its scores, as JSON lines")
    parser.add_argument("--by", default="", metavar="COLUMN", help="scores of each value of a column of the rows, too")
    parser.add_argument("--prefix", default="", metavar="TEXT", help="beginning of every completion")
    decodings = "write accuracy by greedy, sampled, and each first word of demonstrations, and nothing else"
    parser.add_argument("--decodings", type=Path, metavar="FILE", help=decodings)


def _add_env_commands(parser: ArgumentParser) -> None:
    kinds = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, help in (
        ("try", "play one episode in the terminal: by hand, --policy oracle, or --model FOLDER"),
        ("baseline", "mean reward of one of the environment's own policies over many episodes"),
        ("rows", "write a data set of the environment's rows, as Parquet"),
    ):
        one = kinds.add_parser(name, help=help, description=help[0].upper() + help[1:] + ".")
        one.add_argument("name", metavar="FILE:CLASS", help="or a YAML file with the section `environment`")
        one.add_argument("overrides", nargs="*", metavar="key=value", help="of the section, such as limits.turns=3")
        one.add_argument("--seed", type=int, default=0, help="of rows, episodes and policy")
        one.add_argument("--split", default="train", help="part of the environment's rows; default: train")
        one.set_defaults(kind=name)
        default = "random" if name == "baseline" else ""
        shown = "oracle, random, ..." if name != "rows" else "write its turns as rows for asyncrl sft: oracle, ..."
        one.add_argument("--policy", default=default, help=shown)
        unit = "pixels at the side of an image token; default: 28, or with --model what its processor makes"
        one.add_argument("--unit", type=int, help=unit)
        if name == "rows":
            one.add_argument("--count", type=int, default=1000, help="rows, or with --policy episodes")
            one.add_argument("--out", type=Path, required=True, metavar="FILE")
        if name == "try":
            row = "row of the YAML file's data.train_files, from 0; it is row 0 where the environment makes none"
            one.add_argument("--row", type=int, metavar="N", help=row)
            model = "a Hugging Face or PEFT folder plays, by the engine and limits of a run and evaluation.temperature"
            one.add_argument("--model", type=Path, metavar="FOLDER", help=model)
        if name == "baseline":
            one.add_argument("--episodes", type=int, default=400)


EVAL = Command(
    help="score a model folder on data.val_files: plain transformers, or the run's environment",
    run="asyncrl_plugins.evaluation.eval_command:run_eval",
    add_arguments=_add_eval_arguments,
    takes_config=True,
)
ENV = Command(
    help="environments of several turns: play one, estimate a baseline, write rows",
    run="asyncrl_plugins.evaluation.env_command:run_env",
    add_arguments=_add_env_commands,
)
PLAIN = Part(implementation="asyncrl_plugins.evaluation.plain_scores:score_held_out")
