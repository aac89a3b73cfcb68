"""Imports and computations of every forked service's start, done once in the process that forks them."""

from __future__ import annotations

import contextlib
import io
import tempfile
from importlib import import_module
from pathlib import Path

with contextlib.suppress(ImportError):  # installed with vLLM
    import_module("transformers.tokenization_mistral_common")
for module in (
    "asyncrl.launch.train",
    "learner.training_loop",
    "learner.training.engine",
    "PIL.PngImagePlugin",
    "pyarrow.parquet",
    "rollout_server.service",
    "rollout_server.engines.hf.engine",
    "scripted_engine.engine",
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
# The first model that is loaded compiles the names of its tensors.
with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
    import_module("transformers.utils.logging").disable_progress_bar()  # its thread would be forked
    model = import_module("tests.rigs.tiny").make_tiny_model(Path(folder) / "model")
    import_module("transformers").AutoModelForImageTextToText.from_pretrained(model)
    import_module("transformers").AutoProcessor.from_pretrained(model)
    import_module("transformers.utils.logging").enable_progress_bar()
# Each loaded configuration is formatted, for a log that is off: half of what loading one costs.
import_module("transformers").PreTrainedConfig.__repr__ = object.__repr__
