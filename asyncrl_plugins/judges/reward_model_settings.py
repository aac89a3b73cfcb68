"""Settings of a reward model, `kwargs` of its entry in `reward.functions`, and their check."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field

from asyncrl.config.sections import ModelConfig, RewardFunctionConfig, Section, component_name
from asyncrl.errors import UserError
from asyncrl_plugins.judges.settings import settings_of


class RewardModelSettings(Section):
    """`function: reward_model`: a Hugging Face sequence classifier in a process of its own."""

    path: str
    """Folder of the classifier with its tokenizer and chat template, or `org/name` of the hub."""
    device: str = "cpu"
    """`cpu`, or `cuda:1`, ...: a place among all GPUs of the machine, which learner and servers then leave to it."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of its weights; auto is bfloat16 on a GPU, else float32."""
    batch: int = Field(default=16, gt=0)
    """Most samples in one forward pass: those that wait, never waited for."""
    max_length: int = Field(default=0, ge=0)
    """Tokens of prompt and completion; 0 is what the model knows. A longer sample is an error, nothing is cut off."""
    label: int | None = None
    """Class whose probability is the score; needed where the model has several. Of a single one it is the logit."""
    timeout_s: float = Field(default=60.0, gt=0)
    """Longest time for a sample, the batch before its own included; then the process is killed and started again."""
    cpu_threads: int = Field(default=1, gt=0)
    """Torch threads."""
    trust_remote_code: bool = False
    """Run Python code that comes with the folder."""

    @property
    def model(self) -> ModelConfig:
        return ModelConfig(path=self.path, trust_remote_code=self.trust_remote_code)


def check_reward_model(component: RewardFunctionConfig) -> None:
    """Raise UserError for every mistake that can be seen without loading the model."""
    from asyncrl.model_files.folder import check_weights, describe_folder

    settings, name = settings_of(component, RewardModelSettings), f"reward {component_name(component)}"
    if component.group:
        raise UserError(f"{name}: a reward model scores one completion at a time. Remove `group`")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", settings.device):
        raise UserError(f"{name}: kwargs.device is {settings.device!r}. Use cpu, or cuda:1")
    try:
        described = describe_folder(settings.model)
        check_weights(settings.model)
    except UserError as error:
        raise UserError(f"{name}: {str(error).replace('model.path', 'kwargs.path')}") from None
    classes = described.get("architectures") or []
    if not any("SequenceClassification" in each for each in (*classes, *described.get("auto_map", ()))):
        raise UserError(
            f"{name}: kwargs.path is {settings.path!r}, a model of {', '.join(classes) or 'no stated class'}, but a "
            "reward model is a sequence classifier (AutoModelForSequenceClassification). A model that generates can be "
            "asked as a judge: function: llm_judge"
        )
    labels = len(described.get("id2label") or "01")  # transformers' default is two
    if settings.label is None and labels != 1:
        raise UserError(
            f"{name}: the model in {settings.path} has {labels} classes. Set kwargs.label to the number, from 0, of "
            "the one whose probability is the score"
        )
    if settings.label is not None and not 0 <= settings.label < labels:
        raise UserError(f"{name}: kwargs.label is {settings.label}, but the model has classes 0 to {labels - 1}")
