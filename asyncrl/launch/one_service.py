"""`asyncrl learn` and `rollout`: everything cheap is checked, and then this process becomes the one service."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from asyncrl.config.load import load_config
from asyncrl.config.schema import RunConfig
from asyncrl.errors import UserError
from asyncrl.launch.command import become
from learner.ranks.rank_variables import rank_of_service, rank_variables, with_given_ranks


def learn(
    file: Path, overrides: Sequence[str], *, resume: bool, unattended: bool, accept_changes: bool = False
) -> None:
    """Become the learner. Returns where an unattended start finds that the run is finished. Raises UserError."""
    config = load_config(file, overrides)
    if rank_of_service() == 0:  # another one tells rank 0 what is wrong on its machine, once it has joined it
        with telling_ranks(config):
            from asyncrl.checks.inputs import check_inputs

            check_inputs(with_given_ranks(config), "learner")
    from asyncrl.run_folder.contents import is_to_resume

    resumes = is_to_resume(config.run_path, config.trainer.max_steps, file, resume=resume, unattended=unattended)
    if resumes is not None:
        given = {"--resume": resumes, "--accept-changes": accept_changes, "--unattended": unattended}
        flags = [flag for flag, is_given in given.items() if is_given]
        become("learner", "--config", str(file), *flags, *overrides)


def rollout(file: Path, overrides: Sequence[str], *, unattended: bool) -> NoReturn:
    """Become a rollout server. Raises UserError."""
    config = load_config(file, overrides)
    from asyncrl.checks.inputs import check_inputs

    check_inputs(config, "rollout_server")
    become("rollout_server", "--config", str(file), *(["--unattended"] if unattended else []), *overrides)


@contextmanager
def telling_ranks(config: RunConfig) -> Iterator[None]:
    """Tell ranks that torchrun has started what keeps this one, rank 0, from its start."""
    try:
        yield
    except UserError as error:
        environment = rank_variables(config.learner, config.trainer.mode)
        if not environment.is_given:
            raise
        from learner.ranks.processes import telling_given_ranks

        with telling_given_ranks(environment, config.learner.wait_timeout_s):
            raise error
