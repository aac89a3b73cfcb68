"""Imports and computations of every forked service's start, done once in the process that forks them."""

from __future__ import annotations

import contextlib
import io
import tempfile
from importlib import import_module
from pathlib import Path
from typing import get_args

from tests.rigs.zero import HAS_ZERO

for module in (
    "transformers.tokenization_mistral_common",  # installed with vLLM
    "asyncrl_plugins.device_channels.obstacles",
    "asyncrl_plugins.device_channels.sender",
    "asyncrl_plugins.prometheus.learner",
    "asyncrl_plugins.prometheus.server",
):
    with contextlib.suppress(ImportError):  # not in each tree
        import_module(module)
for module in (
    "asyncrl.launch.train",
    "learner.training_loop",
    "asyncrl.telemetry.logs",
    "learner.training.engine",
    "pyarrow.parquet",
    "rollout_server.service",
    "torch.utils.serialization",
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
import_module("PIL.Image").preinit()
import_module("asyncrl.processing.lean_imports").import_peft()
if HAS_ZERO:
    import_module("asyncrl_plugins.deepspeed.placement")
    import_module("deepspeed.runtime.zero.muon.muon_optimizer")  # torch's compiler, which each engine's start imports
# The first configuration imports the descriptions of all plug-ins; each of their sections looks through all modules.
plugins = import_module("asyncrl.plugins")
for group in get_args(plugins.Group):
    plugins.descriptions(group)
import_module("asyncrl.config.load").load_config(import_module("tests.rigs.tiny").GRPO)
# The first processor imports the video processors of all models, the first model compiles the names of all models.
list(import_module("transformers.models.auto.video_processing_auto").VIDEO_PROCESSOR_MAPPING.values())
import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("")
# The first model that is loaded compiles the names of its tensors.
with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
    import_module("transformers.utils.logging").disable_progress_bar()  # its thread would be forked
    model = import_module("tests.rigs.tiny").make_tiny_model(Path(folder) / "model")
    import_module("transformers").AutoModelForImageTextToText.from_pretrained(model)
    parts = import_module("asyncrl.config.sections")
    config = parts.ModelConfig(path=str(model))
    import_module("asyncrl.processing.processor").PromptProcessor(config)
    # Learner and server check each family that they meet.
    import_module("learner.training.packing_check").packing_obstacle(config)
    import_module("rollout_server.engines.hf.decode_check").check_decoding(config)
    import_module("transformers.utils.logging").enable_progress_bar()
# Each loaded configuration is formatted, for a log that is off: half of what loading one costs.
import_module("transformers").PreTrainedConfig.__repr__ = object.__repr__
import_module("asyncrl.telemetry.host_versions").describe_environment()  # versions of packages are kept
