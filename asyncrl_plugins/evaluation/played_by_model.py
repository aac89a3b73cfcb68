"""`asyncrl env try --model FOLDER`: one episode that a model plays, as a run would let it."""

from __future__ import annotations

import argparse
import logging
import tempfile
from functools import partial
from pathlib import Path

from asyncrl.checks.inputs import known_positions
from asyncrl.config import yaml_text
from asyncrl.config.environment import EnvironmentConfig
from asyncrl.config.load import load_config
from asyncrl.config.schema import RunConfig
from asyncrl.config.sections import ModelConfig
from asyncrl.data.images import content_hash
from asyncrl.data.prompts import PromptRenderer
from asyncrl.environments.loading import LoadedEnvironment
from asyncrl.errors import UserError
from asyncrl.model_files.folder import describe_folder
from asyncrl.processing.processor import PromptProcessor
from asyncrl_plugins.evaluation import play
from asyncrl_plugins.evaluation.environment_files import is_file
from asyncrl_plugins.evaluation.held_out import play_row
from asyncrl_plugins.evaluation.terminal import Terminal
from protocol.messages import ChatMessage, ImagePart, Prompt


def try_model(arguments: argparse.Namespace, environment: EnvironmentConfig, loaded: LoadedEnvironment) -> int:
    """Play and print it; the exit code is 1 where the environment loses it. Raises UserError."""
    if arguments.policy:
        raise UserError("--policy and --model both say who plays: leave one out")
    config = _run_config(arguments, environment)
    if arguments.row is None and hasattr(loaded.cls, "make_row"):
        row = play.make_row(loaded, arguments.seed, arguments.split)
        rendered = PromptRenderer(config.data).render(row, f"{arguments.split}:{arguments.seed}")
    else:
        rendered = play.row_of_data(config.data, arguments.row or 0)
    log = logging.getLogger("rollout_server")
    level = log.level
    log.setLevel(logging.CRITICAL)  # what goes wrong is said at the end
    try:
        group, processor = play_row(config, arguments.model, rendered)
    finally:
        log.setLevel(level)
    show = Terminal(Path(tempfile.mkdtemp(prefix="asyncrl-env-")), partial(tokens_of_image, processor))
    show.prompt(rendered)
    show.trajectory(group, processor.decode)
    return 1 if group.trajectories[0].reward is None else 0


def tokens_of_image(processor: PromptProcessor, image: bytes) -> str:
    """Number of tokens that the model reads of an image."""
    digest = content_hash(image)
    message = ChatMessage(role="user", content=(ImagePart(),))
    prompt = Prompt(row_id="an image", messages=(message,), image_hashes=(digest,))
    return str(processor.measure(prompt, {digest: image}).media_tokens)


def _run_config(arguments: argparse.Namespace, environment: EnvironmentConfig) -> RunConfig:
    """The configuration of a run with this environment: the file's own, or for a class the usual one."""
    if is_file(arguments.name):
        words = [f"environment.{word.removeprefix('environment.')}" for word in arguments.overrides]
        return load_config(Path(arguments.name), [*words, f"trainer.seed={arguments.seed}"])
    if arguments.row is not None:
        raise UserError(f"--row is one of data.train_files, and {arguments.name} is no YAML file")
    section = environment.model_dump(mode="json", exclude_unset=True)
    data: dict[str, object] = {"train_files": ["rows of the environment.parquet"]}
    if positions := known_positions(describe_folder(ModelConfig(path=str(arguments.model)))):
        tokens = min(environment.limits.tokens, positions // 2)
        per_turn = min(environment.limits.tokens_per_turn, tokens)
        section["limits"] = environment.limits.model_dump() | {"tokens": tokens, "tokens_per_turn": per_turn}
        data["max_prompt_length"] = positions - tokens
    values = {
        "run_dir": tempfile.gettempdir(),
        "model": {"path": str(arguments.model)},
        "data": data,
        "batch": {"group_size": 2},
        "environment": section,
        "reward": {"functions": []},
        "trainer": {"seed": arguments.seed},
    }
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "usual.yaml"
        file.write_text(yaml_text.write(values), encoding="utf-8")
        return load_config(file)
