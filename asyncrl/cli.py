"""The `asyncrl` command. Handlers import what they need: `--help` and configuration errors are instant."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl import plugins
from asyncrl.demo.choice import DemoRequest, chosen, demos
from asyncrl.errors import ExitCode, UserError, did_you_mean
from asyncrl.launch.command import command

if TYPE_CHECKING:
    from asyncrl.config.schema import RunConfig

SYNC = "trainer.mode=sync"
RESUME = "continue run_dir from its newest checkpoint"
ACCEPT_CHANGES = "with --resume: go on with rows and rewards that have changed, and journal the change"
UNATTENDED = "begin, or continue what run_dir holds: what a restarted container needs. After bad state it refuses"
OVERRIDES = (
    "replace keys of the configuration, or add to a list with +=; a word without `=` is an overlay: a YAML file, an "
    "algorithm such as rloo, or a task of a plug-in"
)
NO_WORD = (
    "Without one, GRPO with a clip of 0.2 and 0.28 and a mean over tokens; `grpo` is the paper's, with 0.2 on both "
    "sides and a mean over trajectories"
)
DRY_RUN = "check and print what would be run, and one rendered prompt; use doctor to check this machine"


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Exit codes: 0 done, 1 crashed, 2 a mistake that the message says how to fix, 3 bad state,
    130 interrupted, 141 the reader of its output has gone."""
    return run_command(argv)


def run_command(argv: Sequence[str] | None) -> int:
    """Run a command, and raise what `main` turns into a line and a code."""
    parser = _parser()
    names = next(action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    word = next(iter(sys.argv[1:] if argv is None else argv), "-")
    if not word.startswith("-") and word not in names:
        parser.error(f"there is no command {word!r}.{did_you_mean(word, names)} {plugins.what_to_install('commands')}")
    # argparse fills `overrides` before it meets the next option; what follows that option arrives as `rest`.
    arguments, rest = parser.parse_known_args(argv)
    if rest and (any(word.startswith("-") for word in rest) or not hasattr(arguments, "overrides")):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        arguments.overrides += rest
    for option in arguments.options if hasattr(arguments, "options") else ():
        is_given = getattr(arguments, option.flag.lstrip("-").replace("-", "_"))
        code = plugins.implementation(option.run)(arguments) if is_given else None
        if code is not None:
            return code
    return arguments.handler(arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="asyncrl", description="Asynchronous reinforcement learning for vision-language models."
    )
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_runs(commands)
    _add_models(commands)
    _add_plugins(commands)
    return parser


def _add_plugins(commands: argparse._SubParsersAction) -> None:
    """Add the commands of plug-ins, and their options of all commands."""
    for name, plugin in plugins.descriptions("commands").items():
        if name in commands.choices:
            raise UserError(f"the plug-in command {name!r} has the name of another one. Uninstall its package")
        if plugin.takes_config:
            parser = _command(commands, name, None, plugin.help)
        elif plugin.parses_words:  # without a prefix of options all words are arguments
            parser = commands.add_parser(name, help=plugin.help, prefix_chars="\0", add_help=False)
            parser.add_argument("words", nargs="*")
        else:
            parser = commands.add_parser(name, help=plugin.help)
        plugin.add_arguments(parser)
        parser.set_defaults(handler=_handler(plugin.run))
    for name, option in plugins.descriptions("options").items():
        parser = commands.choices.get(option.command)
        if parser is None:
            raise UserError(f"the plug-in option {name!r} is one of `asyncrl {option.command}`, which does not exist")
        parser.add_argument(option.flag, **option.settings)
        parser.set_defaults(options=(*(parser.get_default("options") or ()), option))


def _handler(run: str) -> Callable[[argparse.Namespace], int]:
    return lambda arguments: plugins.implementation(run)(arguments)


def _add_runs(commands: argparse._SubParsersAction) -> None:
    """Add the commands that train, whole or one part on a machine."""
    for name, handler, help in (
        ("train", _train, "run a rollout server and a learner on this machine, and watch them"),
        ("sync", _sync, "train, with learner and rollout server taking turns on one device, or on those of its ranks"),
    ):
        train = _command(commands, name, handler, help)
        train.add_argument("--resume", action="store_true", help=RESUME)
        train.add_argument("--accept-changes", action="store_true", help=ACCEPT_CHANGES)
        train.add_argument("--unattended", action="store_true", help=UNATTENDED)
        train.add_argument("--dry-run", action="store_true", help=DRY_RUN)
        train.add_argument("--all", action="store_true", help="with --dry-run: print keys at their defaults, too")
    rollout = _command(commands, "rollout", _rollout, "the rollout server alone")
    rollout.add_argument(
        "--unattended", action="store_true", help="end where run_dir says that the run is finished, for containers"
    )
    learn = _command(commands, "learn", _learn, "the learner alone")
    learn.add_argument("--resume", action="store_true", help=RESUME)
    learn.add_argument("--accept-changes", action="store_true", help=ACCEPT_CHANGES)
    learn.add_argument("--unattended", action="store_true", help=UNATTENDED)


def _add_models(commands: argparse._SubParsersAction) -> None:
    """Add the commands around a model: the demo's, and a run's as a folder."""
    demo = commands.add_parser("demo", help="train a small model on this machine, in one new folder")
    names = "; ".join(f"{name}, {each.help}" for name, each in demos().items())
    words = f"first the demo's name; without one, {chosen(())[0]}. {names}. Then {OVERRIDES}. {NO_WORD}"
    demo.add_argument("overrides", nargs="*", metavar="DEMO|ALGORITHM|key=value", help=words)
    demo.add_argument("--seed", type=int, default=1, help="of data, model, order and sampling")
    demo.add_argument("--folder", type=Path, metavar="DIR", help="new folder; default: the next free runs/demo-N")
    demo.add_argument("--steps", type=int, metavar="N", help="GRPO steps; default: the configuration's")
    demo.add_argument("--from-scratch", action="store_true", help="make the warm start, too: some minutes more")
    demo.add_argument("--quick", action="store_true", help="small and fast, and learns little")
    demo.set_defaults(handler=_demo)
    export = commands.add_parser("export", help="write a checkpoint's model, or adapter, as a folder for others")
    export.add_argument("run_dir", type=Path)
    export.add_argument("target", type=Path)
    export.add_argument("--checkpoint", type=int, metavar="STEP", help="of which step; default: the newest")
    form = export.add_mutually_exclusive_group()
    form.add_argument("--adapter", action="store_true", help="of a LoRA run the adapter alone: default on 16-bit bases")
    form.add_argument("--merged", action="store_true", help="it merged into its base, in float32: default on float32")
    export.set_defaults(handler=_export)


def _command(commands, name: str, handler, help: str) -> argparse.ArgumentParser:
    """Add a command that takes a configuration and overrides."""
    parser = commands.add_parser(name, help=help, description=help[0].upper() + help[1:] + ".")
    parser.add_argument("config", type=Path, help="YAML configuration")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=OVERRIDES)
    parser.set_defaults(handler=handler)
    return parser


def _version() -> str:
    try:
        return version("asyncrl")
    except PackageNotFoundError:
        return "not installed"


def _load(arguments: argparse.Namespace) -> RunConfig:
    from asyncrl.config.load import load_config

    return load_config(arguments.config, arguments.overrides)


def _train(arguments: argparse.Namespace) -> int:
    _check_flags(arguments)
    config = _load(arguments)
    if arguments.dry_run:
        from asyncrl.checks.inputs import dry_run

        dry_run(config, whole=arguments.all)
        return ExitCode.FINISHED
    if arguments.all:
        raise UserError("--all says what --dry-run prints: add --dry-run")
    from asyncrl.launch.train import train
    from asyncrl.run_folder.contents import is_to_resume

    resume = is_to_resume(
        config.run_path,
        config.trainer.max_steps,
        arguments.config,
        resume=arguments.resume,
        unattended=arguments.unattended,
    )
    if resume is None:
        return ExitCode.FINISHED
    return train(config, resume=resume, accept_changes=arguments.accept_changes)


def _check_flags(arguments: argparse.Namespace) -> None:
    if arguments.accept_changes and not arguments.resume:
        raise UserError("--accept-changes is about a run that goes on: add --resume")


def _sync(arguments: argparse.Namespace) -> int:
    if other := [word for word in arguments.overrides if word.startswith("trainer.mode=") and word != SYNC]:
        raise UserError(f"`asyncrl sync` is {SYNC}, and {other[-1]} is given. Use `asyncrl train` for that")
    arguments.overrides.append(SYNC)
    return _train(arguments)


def _rollout(arguments: argparse.Namespace) -> int:
    from asyncrl.launch.one_service import rollout

    rollout(arguments.config, arguments.overrides, unattended=arguments.unattended)


def _learn(arguments: argparse.Namespace) -> int:
    from asyncrl.launch.one_service import learn

    _check_flags(arguments)
    flags = {name: getattr(arguments, name) for name in ("resume", "unattended", "accept_changes")}
    learn(arguments.config, arguments.overrides, **flags)
    return ExitCode.FINISHED


def _demo(arguments: argparse.Namespace) -> int:
    name, words = chosen(arguments.overrides)
    found = demos()
    others = ", ".join(f"asyncrl demo {other} ({demo.help})" for other, demo in found.items() if other != name)
    print(f"{found[name].help}{f'. There are others: {others}' if others else ''}")
    steps = [] if arguments.steps is None else [f"trainer.max_steps={arguments.steps}"]
    request = DemoRequest(
        changes=[*steps, *words],
        **{key: getattr(arguments, key) for key in ("folder", "seed", "from_scratch", "quick")},
    )
    plugins.implementation(found[name].run)(request)
    return 0


def _export(arguments: argparse.Namespace) -> int:
    from asyncrl.run_folder.contents import policy_folder

    source = policy_folder(arguments.run_dir, arguments.checkpoint)
    from learner.loop.policy_export import export_policy

    merged = True if arguments.merged else False if arguments.adapter else None
    print(export_policy(arguments.run_dir, source, arguments.target, merged=merged))
    return 0
