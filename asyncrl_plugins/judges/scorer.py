"""Scorers of the rewards `llm_judge` and `reward_model`: one process each, which takes many samples at a time."""

from __future__ import annotations

import os

from asyncrl.config.sections import RewardFunctionConfig, component_name
from asyncrl.devices.gpu_assignment import GPUS_VARIABLE, listed_gpus
from asyncrl.errors import UserError
from asyncrl.rewards.process_scorer import ProcessScorer
from asyncrl.workers.process import WorkerProgram
from asyncrl_plugins.judges.judge_settings import JudgeSettings
from asyncrl_plugins.judges.reward_model_settings import RewardModelSettings
from asyncrl_plugins.judges.settings import settings_of

LOAD_TIMEOUT_S = 900.0
"""Seconds for a reward model's weights to be read and moved to its device."""
GRACE_S = 5.0
"""Seconds that a process gets beyond a sample's time limit to say by itself that it was too long."""


def judge_scorer(component: RewardFunctionConfig) -> ProcessScorer:
    settings = settings_of(component, JudgeSettings)
    return _scorer(component, settings, "asyncrl_plugins.judges.judge", settings.concurrency, {})


def reward_model_scorer(component: RewardFunctionConfig) -> ProcessScorer:
    """Raises UserError for a GPU that the run has not."""
    settings = settings_of(component, RewardModelSettings)
    variables, device = _own_gpu(settings.device, component_name(component))
    settings = settings.model_copy(update={"device": device})
    places = 2 * settings.batch  # a batch that is computed, and the next
    return _scorer(component, settings, "asyncrl_plugins.judges.reward_model", places, variables)


def _scorer(
    component: RewardFunctionConfig,
    settings: JudgeSettings | RewardModelSettings,
    module: str,
    places: int,
    variables: dict[str, str],
) -> ProcessScorer:
    name = component_name(component)
    program = WorkerProgram(
        module=module,
        setup={"name": name, "settings": settings.model_dump()},
        section="reward",
        loads=f"reward {name}",
        start_timeout_s=LOAD_TIMEOUT_S,
        variables=variables,
    )
    return ProcessScorer(lambda: program, settings.timeout_s, setting="its timeout_s", places=places, grace_s=GRACE_S)


def _own_gpu(device: str, name: str) -> tuple[dict[str, str], str]:
    """Environment and device by which a process sees the GPU of that number alone, among all that the launcher has."""
    number, gpus = device.partition(":")[2], listed_gpus(os.environ.get(GPUS_VARIABLE, ""))
    if not number or not gpus:
        return {}, device
    if int(number) >= len(gpus):
        raise UserError(
            f"reward {name}: kwargs.device is {device}, but the run has {len(gpus)} GPU(s), numbered from 0"
        )
    return {"CUDA_VISIBLE_DEVICES": gpus[int(number)]}, "cuda:0"
