"""The `asyncrl` command. Handlers import what they need: `--help` and configuration errors are instant."""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from asyncrl.environments.command import add_commands as add_environment_commands
from asyncrl.errors import ExitCode, UserError
from asyncrl.launch.command import command
from asyncrl.run_folder.checkpoints import CHECKPOINTS, checkpoint_folders

if TYPE_CHECKING:
    from asyncrl.config.schema import RunConfig
    from asyncrl.launch.inputs import Side

RESUME = "continue run_dir from its newest checkpoint"
UNATTENDED = "begin, or continue what run_dir holds: what a restarted container needs. After bad state it refuses"
OVERRIDES = (
    "replace keys of the configuration, or add to a list with +=; a word without `=` is an overlay: a YAML file, an "
    "algorithm such as rloo, or a task such as geo3k"
)
NO_WORD = (
    "Without one, GRPO with a clip of 0.2 and 0.28 and a mean over tokens; `grpo` is the paper's, with 0.2 on both "
    "sides and a mean over trajectories"
)
EVAL = "score a model folder on data.val_files: with plain transformers, or the run's engine and environment"
DRY_RUN = "check and print what would be run, and one rendered prompt; use doctor to check this machine"


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Exit codes: 0 done, 1 crashed, 2 a mistake that the message says how to mend, 3 bad state,
    130 interrupted, 141 the reader of its output has gone."""
    parser = _parser()
    # argparse fills `overrides` before it meets the next option; what follows that option arrives as `rest`.
    arguments, rest = parser.parse_known_args(argv)
    if rest and (any(word.startswith("-") for word in rest) or not hasattr(arguments, "overrides")):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        arguments.overrides += rest
    return arguments.handler(arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="asyncrl", description="Asynchronous reinforcement learning for vision-language models."
    )
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    for name, handler, help in (
        ("train", _train, "run a rollout server and a learner on this machine, and watch them"),
        ("sync", _sync, "train, with learner and rollout server taking turns on one device"),
    ):
        train = _command(commands, name, handler, help)
        train.add_argument("--resume", action="store_true", help=RESUME)
        train.add_argument("--unattended", action="store_true", help=UNATTENDED)
        train.add_argument("--dry-run", action="store_true", help=DRY_RUN)
    _command(commands, "sft", _sft, "supervised warm start on data.target_key")
    compose = commands.add_parser("compose", help="make a vision-language model of a vision tower and a language model")
    compose.add_argument("target", type=Path, help="new Hugging Face folder")
    compose.add_argument("parts", nargs="+", metavar="FILE|key=value", help="such as vision_tower=DIR, in YAML or here")
    compose.set_defaults(handler=_compose)
    rollout = _command(commands, "rollout", _rollout, "the rollout server alone")
    rollout.add_argument(
        "--unattended", action="store_true", help="end where run_dir says that the run is finished, for containers"
    )
    pool = commands.add_parser(
        "pool", help="worker processes of rewards and environments, for rollout servers elsewhere"
    )
    pool.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="address to listen at; 0.0.0.0 for all")
    pool.add_argument(
        "--port", type=int, default=7603, help="the one of reward.pool and environment.pool; default: 7603"
    )
    pool.add_argument("--keys-dir", type=Path, metavar="DIR", help="folder made by `asyncrl keys`, for CURVE")
    pool.add_argument(
        "--insecure", action="store_true", help="listen beyond loopback without keys: code from anyone runs"
    )
    pool.add_argument(
        "--processes", type=int, default=64, metavar="N", help="most at a time, of all servers; default: 64"
    )
    pool.set_defaults(handler=_pool)
    learn = _command(commands, "learn", _learn, "the learner alone")
    learn.add_argument("--resume", action="store_true", help=RESUME)
    learn.add_argument("--unattended", action="store_true", help=UNATTENDED)
    evaluate = _command(
        commands, "eval", _eval, "score a model folder on data.val_files: plain transformers, or the run's environment"
    )
    evaluate.add_argument("--model", type=Path, required=True, help="Hugging Face folder, or a PEFT folder")
    evaluate.add_argument(
        "--out", type=Path, metavar="FILE", help="write each completion with its scores, as JSON lines"
    )
    evaluate.add_argument("--prefix", default="", metavar="TEXT", help="what every completion is made to begin with")

    add_environment_commands(commands)
    demo = commands.add_parser("demo", help="train a small vision-language model on this machine, in one new folder")
    demo.add_argument("overrides", nargs="*", metavar="ALGORITHM|key=value", help=f"{OVERRIDES}. {NO_WORD}")
    demo.add_argument("--seed", type=int, default=1, help="of data, model, order and sampling")
    demo.add_argument("--folder", type=Path, metavar="DIR", help="new folder; default: the next free runs/demo-N")
    demo.add_argument("--steps", type=int, metavar="N", help="GRPO steps; default: the configuration's")
    demo.add_argument("--from-scratch", action="store_true", help="make the warm start, too: some minutes more")
    demo.add_argument("--quick", action="store_true", help="small and fast, and learns little")
    demo.set_defaults(handler=_demo)
    export = commands.add_parser("export", help="write a checkpoint's model as a Hugging Face folder, adapter merged")
    export.add_argument("run_dir", type=Path)
    export.add_argument("target", type=Path)
    export.add_argument("--checkpoint", type=int, metavar="STEP", help="of which step; default: the newest")
    export.add_argument("--adapter", action="store_true", help="of a LoRA run the adapter alone, as a PEFT folder")
    export.set_defaults(handler=_export)
    # Without a prefix of options all words are arguments, and asyncrl.tools.inspect reads them itself.
    inspect = commands.add_parser("inspect", help="look at any sample of a run", prefix_chars="\0", add_help=False)
    inspect.add_argument("words", nargs="*")
    inspect.set_defaults(handler=_inspect)
    replay = commands.add_parser("replay", help="make a learner step again from the journal, and compare")
    replay.add_argument("run_dir", type=Path, metavar="RUN")
    replay.add_argument("--step", type=int, required=True, metavar="N")
    replay.add_argument("overrides", nargs="*", metavar="key=value", help="see what another setting would change")
    replay.set_defaults(handler=_replay)
    report = commands.add_parser("report", help="write an HTML page about a run, or about several side by side")
    report.add_argument("run_dirs", nargs="+", type=Path, metavar="RUN")
    report.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="default: RUN/report.html; of several: report.html"
    )
    report.set_defaults(handler=_report)
    doctor = commands.add_parser(
        "doctor", help="what this machine has, what is wrong with it, and what a run will need"
    )
    doctor.add_argument("overrides", nargs="*", metavar="CONFIG key=value", help="check this configuration, too")
    doctor.add_argument("--plan", metavar="TARGET", help="memory table of a model folder or configuration, no weights")
    doctor.add_argument("--quick", action="store_true", help="everything but the trial, a real run of two tiny steps")
    doctor.add_argument("--json", action="store_true", help="for scripts; the exit code is 1 if there is a problem")
    doctor.set_defaults(handler=_doctor)
    health = commands.add_parser("health", help="exit code 0 if the service behind a metrics endpoint does its work")
    health.add_argument("url", metavar="URL", help="such as http://127.0.0.1:9101/metrics")
    health.set_defaults(handler=_health)
    watch = commands.add_parser("watch", help="live panel of a run, wherever it was started")
    watch.add_argument("run_dir", type=Path, metavar="RUN")
    watch.set_defaults(handler=_watch)
    keys = commands.add_parser("keys", help="make key pairs for learner and rollout servers on several machines")
    keys.add_argument("folder", type=Path, metavar="DIR", help="becomes network.keys_dir")
    keys.add_argument("--server", metavar="NAME", help="only one more server's pair, which can be withdrawn alone")
    keys.add_argument("--pool", action="store_true", help="only the pair of machines that run `asyncrl pool`")
    keys.set_defaults(handler=_keys)
    imported = commands.add_parser("import-config", help="a configuration of RLLaVA, EasyR1, verl or TRL")
    imported.add_argument("source", type=Path, metavar="FILE", help="their YAML file, or the script that starts it")
    imported.add_argument("-o", dest="out", type=Path, metavar="OUT", help="write OUT and say what became of each key")
    imported.add_argument(
        "--accept-losses", action="store_true", help="exit code 0 also where an algorithm, role or precision is lost"
    )
    imported.set_defaults(handler=_import_config)
    reference = commands.add_parser("config-reference", help="print every configuration key as Markdown")
    reference.set_defaults(handler=_config_reference)
    return parser


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
    config = _load(arguments)
    if arguments.dry_run:
        return _dry_run(config)
    from asyncrl.launch.train import train

    resume = _is_to_resume(arguments, config)
    return ExitCode.FINISHED if resume is None else train(config, resume=resume)


def _dry_run(config: RunConfig) -> int:
    """Explain the configuration, and refuse what `train` would refuse of it on any machine; devices that this one has
    not are a note."""
    import asyncio

    from asyncrl.config.explain import explain
    from asyncrl.launch.inputs import check_devices, check_references
    from asyncrl.rewards.pool import try_loading

    with _uncollected():
        check_references(config, "learner", "rollout_server")
        asyncio.run(try_loading(config.reward))
        from asyncrl.models.lean_imports import import_processors

        import_processors()
        from asyncrl.models.prompt_rows import preview_rows

        seen, num_rows = preview_rows(config)
        print(explain(config, num_rows))
        print(seen)
        if config.batch.tokens_per_microbatch == "auto":
            from asyncrl.tools.memory_plan.token_choice import gpu_bytes, settle_tokens

            print(f"note: {settle_tokens(config, gpu_bytes(config))[1]}")
        try:
            check_devices(config, ("learner", "rollout_server"))
        except UserError as problem:
            print(f"note: this machine cannot train it: {problem}")
    return 0


@contextmanager
def _uncollected() -> Iterator[None]:
    """Keep the garbage collector from looking through all of torch's and transformers' objects while they are imported:
    an eighth of the time of a command that is short."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _is_to_resume(arguments: argparse.Namespace, config: RunConfig) -> bool | None:
    """None where an unattended start finds that the run is finished, and has said so."""
    if not arguments.unattended:
        return arguments.resume
    if arguments.resume:
        raise UserError("--unattended decides by itself whether to --resume: give one of the two")
    from asyncrl.run_folder.contents import describe_finished, next_attempt

    attempt = next_attempt(config)
    if attempt == "nothing":
        print(describe_finished(config, arguments.config))
        return None
    return attempt == "continue"


def _sync(arguments: argparse.Namespace) -> int:
    arguments.overrides.append("trainer.mode=sync")
    return _train(arguments)


def _sft(arguments: argparse.Namespace) -> int:
    from asyncrl.launch.inputs import check_sft_inputs
    from asyncrl.run_folder.contents import check_run_dir
    from asyncrl.run_folder.lock import refuse_busy
    from learner.ranks.environment import rank_of_service

    config = _load(arguments)
    if rank_of_service() == 0:
        with _telling_ranks(config):
            refuse_busy(config.run_path)
            check_run_dir(config, resume=False)
            check_sft_inputs(config)
    _exec_module("learner.sft", "--config", str(arguments.config), *arguments.overrides)


def _compose(arguments: argparse.Namespace) -> int:
    from asyncrl.config.composition import load_composition

    parts = load_composition(arguments.parts)
    if arguments.target.exists():
        raise UserError(f"{arguments.target} exists already. Name a new folder")
    from asyncrl.models.composition import compose

    print(compose(parts, arguments.target))
    return 0


def _rollout(arguments: argparse.Namespace) -> int:
    _check(arguments, "rollout_server")
    flags = ["--unattended"] if arguments.unattended else []
    _exec_module("rollout_server", "--config", str(arguments.config), *flags, *arguments.overrides)


def _pool(arguments: argparse.Namespace) -> int:
    from asyncrl.pools.command import serve

    serve(
        arguments.host, arguments.port, arguments.keys_dir, insecure=arguments.insecure, processes=arguments.processes
    )
    return ExitCode.FINISHED


def _learn(arguments: argparse.Namespace) -> int:
    from learner.ranks.environment import rank_of_service

    config = _load(arguments)
    if rank_of_service() == 0:  # another one tells rank 0 what is wrong on its machine, once it has joined it
        with _telling_ranks(config):
            _check(arguments, "learner")
    resume = _is_to_resume(arguments, config)
    if resume is None:
        return ExitCode.FINISHED
    flags = [*(["--resume"] if resume else []), *(["--unattended"] if arguments.unattended else [])]
    _exec_module("learner", "--config", str(arguments.config), *flags, *arguments.overrides)


@contextmanager
def _telling_ranks(config: RunConfig) -> Iterator[None]:
    """Tell ranks that torchrun has started what keeps this one, rank 0, from its start."""
    try:
        yield
    except UserError as error:
        from learner.ranks.environment import rank_environment

        environment = rank_environment(config)
        if not environment.is_given:
            raise
        from learner.ranks.processes import telling_given_ranks

        with telling_given_ranks(config, environment):
            raise error


def _check(arguments: argparse.Namespace, side: Side) -> RunConfig:
    """Report mistakes before anything heavy is loaded."""
    from asyncrl.launch.inputs import check_inputs

    config = _load(arguments)
    if side == "learner":
        from learner.ranks.environment import with_given_ranks

        config = with_given_ranks(config)
    check_inputs(config, side)
    return config


def _exec_module(module: str, *arguments: str) -> NoReturn:
    """Replace this process: signals and the exit code are the service's own."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])


def _eval(arguments: argparse.Namespace) -> int:
    from asyncrl.tools.evaluate import component_means, conversation_lines, score_held_out, summarise, write_scored

    config = _load(arguments)
    if arguments.out and not arguments.out.absolute().parent.is_dir():
        raise UserError(f"--out is {arguments.out}, but there is no folder {arguments.out.absolute().parent}")
    if config.environment.is_used:
        if arguments.prefix:
            raise UserError("--prefix begins completions of one turn, and an environment answers: leave --prefix out")
        from rollout_server.evaluation import play_held_out

        scored = play_held_out(config, arguments.model)
    else:
        scored = score_held_out(config, arguments.model, prefix=arguments.prefix)
    if arguments.out:
        write_scored(scored, arguments.out)
    scores, size = summarise(config, scored), config.evaluation.group_size
    found = [f"pass@1 {scores.accuracy:.4f} ± {scores.accuracy_error:.4f} (standard error)"]
    found += [f"pass@{size} {scores.best:.4f}"] if size > 1 else []
    print("   ".join([*found, f"reward {scores.reward:.4f}", f"rows {scores.rows}", f"errors {scores.errors}"]))
    if means := component_means(scored):
        print("components   " + "   ".join(f"{name} {mean:.4f}" for name, mean in means.items()))
    print("".join(f"{line}\n" for line in conversation_lines(scored)), end="")
    return 0


def _demo(arguments: argparse.Namespace) -> int:
    from asyncrl.demo.command import demo

    steps = [] if arguments.steps is None else [f"trainer.max_steps={arguments.steps}"]
    changes = [*steps, *arguments.overrides]
    demo(arguments.folder, arguments.seed, changes, from_scratch=arguments.from_scratch, quick=arguments.quick)
    return 0


def _export(arguments: argparse.Namespace) -> int:
    checkpoints = checkpoint_folders(arguments.run_dir)
    if not checkpoints:
        raise UserError(f"there is no checkpoint in {arguments.run_dir / CHECKPOINTS}")
    step = max(checkpoints) if arguments.checkpoint is None else arguments.checkpoint
    if step not in checkpoints:
        raise UserError(
            f"there is no checkpoint of step {step}: {arguments.run_dir} has those of {sorted(checkpoints)}"
        )
    if arguments.target.exists():
        raise UserError(f"{arguments.target} exists already. Name a new folder")
    from asyncrl.models.export import export_checkpoint

    print(export_checkpoint(arguments.run_dir, checkpoints[step], arguments.target, keep_adapter=arguments.adapter))
    return 0


def _inspect(arguments: argparse.Namespace) -> int:
    _exec_module("asyncrl.tools.inspect", *arguments.words)


def _report(arguments: argparse.Namespace) -> int:
    from asyncrl.tools.report.write import write_report

    write_report(arguments.run_dirs, arguments.output)
    return 0


def _replay(arguments: argparse.Namespace) -> int:
    _exec_module("learner.replay", str(arguments.run_dir), "--step", str(arguments.step), *arguments.overrides)


def _doctor(arguments: argparse.Namespace) -> int:
    first, *rest = arguments.overrides or [""]
    overrides = arguments.overrides if arguments.plan else rest
    if not arguments.plan and "=" in first:
        raise UserError(
            "expected: asyncrl doctor [CONFIG [key=value ...]], or asyncrl doctor --plan TARGET [key=value ...]"
        )
    if arguments.plan:
        from asyncrl.tools.memory_plan.table import print_memory_table

        return print_memory_table(Path(arguments.plan), overrides)
    with _uncollected():
        from asyncrl.tools.doctor.examine import examine

        return examine(Path(first) if first else None, overrides, quick=arguments.quick, as_json=arguments.json)


def _health(arguments: argparse.Namespace) -> int:
    from asyncrl.tools.health import find_problems

    found = find_problems(arguments.url)
    print("\n".join(found) or "well")
    return 1 if found else 0


def _watch(arguments: argparse.Namespace) -> int:
    from asyncrl.tools.panel.display import watch

    return watch(arguments.run_dir)


def _keys(arguments: argparse.Namespace) -> int:
    from protocol.curve import POOL_ADVICE, KeyFileError, copying_advice, make_keys, make_pool_keys

    folder, server = arguments.folder, arguments.server
    if server and arguments.pool:
        raise UserError("--server and --pool are two commands: give one of them")
    try:
        written = make_pool_keys(folder) if arguments.pool else make_keys(folder, server)
    except KeyFileError as error:
        raise UserError(str(error)) from error
    print("\n".join(f"wrote {path}" for path in written))
    print(POOL_ADVICE if arguments.pool else copying_advice(folder, server))
    return 0


def _import_config(arguments: argparse.Namespace) -> int:
    from asyncrl.tools.import_config.write import import_config

    return import_config(arguments.source, arguments.out, accept_losses=arguments.accept_losses)


def _config_reference(_: argparse.Namespace) -> int:
    from asyncrl.config.explain import config_reference

    print(config_reference())
    return 0
