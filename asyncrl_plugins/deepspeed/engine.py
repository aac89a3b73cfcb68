"""DeepSpeed's engine around a model: its settings, its start in a process group that is there, and one forward pass."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from typing import Any, TypeVar

import torch
from torch.distributed.distributed_c10d import _set_pg_timeout

from asyncrl.config.service_sections import LearnerConfig
from asyncrl.errors import UserError
from asyncrl_plugins.deepspeed.plugin import ZERO_BUCKET, ZERO_LIVE, DeepSpeedConfig

T = TypeVar("T")
OLDEST = (0, 19, 8)
"""Version of DeepSpeed that this is written for: an older one would ignore settings that it does not know."""
PERSISTENT = 100_000
"""Elements up to which a parameter stays whole on each rank between steps of stage 3 (DeepSpeed's own number)."""


@dataclass(frozen=True)
class ZeroSettings:
    stage: int
    """1 divides the optimiser's state, 2 gradients, too, and 3 also the weights (arXiv 1910.02054)."""
    cpu_offload: bool
    device: torch.device
    wait_s: float
    """Longest wait of a collective."""

    @staticmethod
    def of(config: LearnerConfig, device: torch.device) -> ZeroSettings:
        own = config.settings_of(DeepSpeedConfig)
        return ZeroSettings(own.zero_stage, config.cpu_offload, device, config.wait_timeout_s)

    def as_deepspeed(self, max_grad_norm: float) -> dict[str, Any]:
        """DeepSpeed's configuration. bf16 is not switched on there, since it would cast all weights, and take another
        optimiser at stage 1: weights keep the dtype that they come with."""
        offload = {"device": "cpu", "pin_memory": self.device.type == "cuda"} if self.cpu_offload else None
        return {
            "train_micro_batch_size_per_gpu": 1,
            "managed_gradient_accumulation": False,  # backward passes add up until a step is made
            "gradient_clipping": max_grad_norm,
            "communication_data_type": "fp32",
            "data_types": {"grad_accum_dtype": "fp32"},
            "zero_force_ds_cpu_optimizer": False,  # torch's AdamW is fused on CPUs, too, and needs no compiler
            "timers": {"throughput": {"enabled": False}},
            "zero_optimization": {
                "stage": self.stage,
                "reduce_bucket_size": ZERO_BUCKET,
                "allgather_bucket_size": ZERO_BUCKET,
                "stage3_prefetch_bucket_size": ZERO_BUCKET,
                "stage3_max_live_parameters": ZERO_LIVE,
                "stage3_max_reuse_distance": ZERO_LIVE,
                "stage3_param_persistence_threshold": PERSISTENT,
                "memory_efficient_linear": False,  # it would replace torch.nn.functional.linear in this process
                "offload_optimizer": offload,
                "offload_param": offload if self.stage == 3 else None,
            },
        }


def load_deepspeed(settings: ZeroSettings) -> Any:
    """The package `deepspeed`, with this process's group and device. Raises UserError where it is missing or old."""
    if find_spec("deepspeed") is None:
        raise UserError(
            "learner.engine is deepspeed, and the package is not installed here: pip install "
            "'asyncrl[learner-deepspeed]', or set learner.engine=fsdp2, which needs none"
        )
    on_gpu = settings.device.type == "cuda"
    # Parameters of stage 3 are gathered on the GPU of this number.
    os.environ["LOCAL_RANK"] = str(torch.cuda.current_device() if on_gpu else 0)
    import deepspeed
    from deepspeed.accelerator import set_accelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
    from deepspeed.ops import __compatible_ops__
    from deepspeed.utils import nvtx

    if (deepspeed.__version_major__, deepspeed.__version_minor__, deepspeed.__version_patch__) < OLDEST:
        raise UserError(
            f"learner.engine is deepspeed, and version {deepspeed.__version__} is installed, which lacks settings that "
            f"it needs: pip install 'deepspeed>={'.'.join(map(str, OLDEST))}'"
        )
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", r"`torch.distributed.\w+_tensor` is deprecated", FutureWarning)  # its calls
    if not on_gpu:
        set_accelerator(CPU_Accelerator())  # also where the machine has GPUs
        os.environ.setdefault("LOCAL_SIZE", "1")  # its number of devices; else a program is asked at every bucket
        nvtx.enable_nvtx = False  # marks in the timeline of a GPU, around each of its functions
    __compatible_ops__["deepspeed_shm_comm"] = False  # collectives of its own on CPUs: compiled for most of a minute
    deepspeed.init_distributed(dist_init_required=False)
    return deepspeed


class Root(torch.nn.Module):
    """The module whose forward pass DeepSpeed watches: it computes what it is given."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.model = model
        self.compute: Callable[[], Any] = lambda: None

    def forward(self) -> Any:
        return self.compute()


class ZeroEngine:
    """DeepSpeed's engine of one model, with or without an optimiser."""

    def __init__(
        self,
        model: torch.nn.Module,
        settings: ZeroSettings,
        optimizer: torch.optim.Optimizer | None = None,
        max_grad_norm: float = 0.0,
    ):
        deepspeed = load_deepspeed(settings)
        self._settings = settings
        self._root = Root(model)
        self.deepspeed: Any = deepspeed.initialize(
            model=self._root,
            optimizer=optimizer,
            config=settings.as_deepspeed(max_grad_norm),
            dist_init_required=False,
        )[0]
        # It has made a group of its own, with torch's deadline.
        _set_pg_timeout(timedelta(seconds=settings.wait_s), self.deepspeed.data_parallel_group)

    def run(self, compute: Callable[[], T]) -> T:
        """Compute with the model's weights. Tensors with a gradient are returned as such, or in tuples and dicts."""
        self._root.compute = compute
        return self.deepspeed()
