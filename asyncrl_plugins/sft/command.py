"""`asyncrl sft`: everything cheap is checked, and then this process becomes the run."""

from __future__ import annotations

import argparse
from typing import NoReturn

from asyncrl.config.load import load_config
from asyncrl.config.schema import RunConfig
from asyncrl.launch.command import become
from asyncrl.launch.one_service import telling_ranks
from asyncrl_plugins.sft.settings import evaluator, scores_completions
from learner.ranks.rank_variables import rank_of_service


def run(arguments: argparse.Namespace) -> NoReturn:
    """Raises UserError."""
    config = load_config(arguments.config, arguments.overrides)
    if rank_of_service() == 0:
        with telling_ranks(config):
            from asyncrl.run_folder.contents import check_run_dir
            from asyncrl.run_folder.lock import refuse_busy
            from asyncrl_plugins.sft.start import check_start

            refuse_busy(config.run_path)
            check_start(config.run_path, resume=arguments.resume)
            if not arguments.resume:
                check_run_dir(config.run_path, resume=False)
            _check_inputs(config)
    resume = ["--resume"] if arguments.resume else []
    become("asyncrl_plugins.sft.run", "--config", str(arguments.config), *resume, *arguments.overrides)


def _check_inputs(config: RunConfig) -> None:
    from asyncrl.checks.inputs import (
        check_data,
        check_model,
        check_rewards,
        check_rotary,
        check_trackers,
        check_weights,
    )

    if scores_completions(config):
        evaluator()
    check_trackers(config.telemetry)
    described = check_model(config.model)
    check_rotary(config.data.max_prompt_length + config.data.max_response_length, config.model, described)
    check_data(config, described, "sft")
    check_rewards(config.reward)
    check_weights(config.model)
