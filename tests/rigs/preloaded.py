"""What every forked service would import, or work out, at its start: done once in the process that forks them."""

from __future__ import annotations

import contextlib
from importlib import import_module

with contextlib.suppress(ImportError):  # installed with vLLM
    import_module("transformers.tokenization_mistral_common")
for module in (
    "asyncrl.launch.train",
    "learner.service",
    "learner.sft",
    "learner.training.engine",
    "PIL.PngImagePlugin",
    "pyarrow.parquet",
    "rollout_server.service",
    "rollout_server.engines.hf.engine",
    "rollout_server.engines.scripted",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.processing_auto",
    "transformers.models.qwen2_vl.image_processing_qwen2_vl",
    "transformers.models.qwen2_vl.modeling_qwen2_vl",
    "transformers.models.qwen2_vl.processing_qwen2_vl",
    "transformers.models.qwen2_vl.video_processing_qwen2_vl",
):
    import_module(module)
# The first processor imports the video processors of all models, the first model compiles the names of all models.
list(import_module("transformers.models.auto.video_processing_auto").VIDEO_PROCESSOR_MAPPING.values())
import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("")
# Each loaded configuration is formatted, for a log that is off: half of what loading one costs.
import_module("transformers").PreTrainedConfig.__repr__ = object.__repr__
