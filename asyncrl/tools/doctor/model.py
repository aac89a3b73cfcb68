"""The model folder's small files, what is wanted of them, and whether this machine's devices and engine can do it."""

from __future__ import annotations

from typing import Any

from asyncrl.config.model import ModelConfig
from asyncrl.config.schema import RunConfig
from asyncrl.errors import UserError
from asyncrl.launch.inputs import check_devices, check_engine, check_lengths, check_model
from asyncrl.models.folder import check_weights
from asyncrl.tools.doctor.findings import Finding, Findings


def find_model(config: RunConfig) -> Findings[dict[str, Any]]:
    """The folder's config.json."""
    described = check_model(config)
    _check_config(config.model)
    check_lengths(config, described)
    check_weights(config.model)
    check_devices(config, ("learner", "rollout_server"))
    check_engine(config)
    kind = described.get("model_type", "of no stated type")
    yield Finding("model", f"{config.model.path}: {kind}, engine {config.rollout.engine}, mode {config.trainer.mode}")
    return described


def _check_config(config: ModelConfig) -> None:
    from transformers import AutoConfig

    try:
        AutoConfig.from_pretrained(config.path, trust_remote_code=config.trust_remote_code)
    except Exception as error:  # whatever a model's own validation raises
        text = " ".join(str(error).split())
        raise UserError(
            f"transformers refuses config.json in {config.path}: {type(error).__name__}: {text}. Copy it from the "
            "original model again, or install the version of transformers that knows this model"
        ) from error
