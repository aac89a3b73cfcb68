"""vLLM's package for CUDA on a machine without a GPU: whether it loads, takes our arguments, and makes our worker.

    bash scripts/vllm_for_cuda.sh FOLDER

installs that package in a folder (8 GB) and runs this file there. A stand-in for the driver, `libcuda.so.1`, answers
each call with "no device"; the H100 that vLLM asks NVML and torch for is made up. No kernel runs: what is checked ends
where the first one would begin.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import subprocess
import sys
import tempfile
import traceback
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

GIB = 1 << 30
NAME, CAPABILITY, MEMORY = "NVIDIA H100 80GB HBM3", (9, 0), 80 * GIB
LIBRARIES = ("_C_stable_libtorch", "_moe_C_stable_libtorch", "cumem_allocator", "vllm_flash_attn/_vllm_fa2_C")
BANNED = 3
"""A token id."""
NO_DEVICE = 100
"""CUDA_ERROR_NO_DEVICE"""


def build_driver(folder: Path) -> None:
    """Compile a libcuda.so.1 with each function of the driver that vLLM's libraries name."""
    (package,) = find_spec("vllm").submodule_search_locations  # type: ignore[union-attr]
    names = {"cuInit", "cuDriverGetVersion", "cuDeviceGetCount"}
    for library in Path(package).rglob("*.so"):
        listed = subprocess.run(["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True)
        symbols = (line.split()[-1].partition("@")[0] for line in listed.stdout.splitlines())
        names |= {name for name in symbols if name.startswith("cu") and name[2:3].isupper()}
    source = folder / "driver.c"
    source.write_text("".join(f"int {name}() {{ return {NO_DEVICE}; }}\n" for name in sorted(names)))
    command = ["gcc", "-w", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", str(source)]
    subprocess.run([*command, "-o", str(folder / "libcuda.so.1")], check=True)


def fake_device() -> None:
    """Let torch and NVML describe one H100, in this process."""
    import torch
    import vllm.third_party.pynvml as nvml  # pyright: ignore[reportMissingImports]

    properties = SimpleNamespace(name=NAME, major=9, minor=0, total_memory=MEMORY, multi_processor_count=132)
    memory = SimpleNamespace(total=MEMORY, free=MEMORY - GIB, used=GIB)
    of_torch: dict[str, Any] = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_capability": CAPABILITY,
        "get_device_name": NAME,
        "get_device_properties": properties,
        "mem_get_info": (memory.free, memory.total),
    }
    of_nvml: dict[str, Any] = {
        "nvmlInit": None,
        "nvmlShutdown": None,
        "nvmlDeviceGetCount": 1,
        "nvmlDeviceGetHandleByIndex": 0,
        "nvmlDeviceGetName": NAME,
        "nvmlDeviceGetUUID": "GPU-0",
        "nvmlDeviceGetCudaComputeCapability": CAPABILITY,
        "nvmlDeviceGetMemoryInfo": memory,
    }
    for module, answers in ((torch.cuda, of_torch), (nvml, of_nvml)):
        for function, answer in answers.items():
            setattr(module, function, lambda *_, _answer=answer, **__: _answer)


def check_libraries(_: Path) -> str:
    """vLLM's compiled libraries load: their symbols are in this torch, and their operators are there."""
    import torch
    import vllm  # pyright: ignore[reportMissingImports]
    from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

    for name in LIBRARIES:
        (file,) = Path(vllm.__file__).parent.glob(f"{name}*.so")
        torch.ops.load_library(str(file)) if not file.name.startswith("cumem") else ctypes.CDLL(str(file))
    assert current_platform.is_cuda()
    assert current_platform.get_device_capability() == CAPABILITY
    assert torch.ops._C.rms_norm
    return f"{len(LIBRARIES)} libraries, platform {type(current_platform).__name__}"


def check_worker(_: Path) -> str:
    """The GPU worker and its model runner import, and ours with its weight-transfer backend beside them."""
    from vllm.distributed.weight_transfer.factory import (  # pyright: ignore[reportMissingImports]
        WeightTransferEngineFactory,
    )
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner  # pyright: ignore[reportMissingImports]
    from vllm.v1.worker.gpu_worker import Worker  # pyright: ignore[reportMissingImports]

    from asyncrl_plugins.vllm import worker
    from asyncrl_plugins.vllm.engine_process import BACKEND

    clash = {name for name in vars(worker.WorkerExtension) if not name.startswith("__") and hasattr(Worker, name)}
    assert not clash, clash
    assert WeightTransferEngineFactory._registry[BACKEND]() is worker.WeightTransfer
    return f"{Worker.__module__}, {GPUModelRunner.__module__}"


CASES: dict[str, dict[str, dict[str, Any]]] = {
    "async": {},
    "sync, one GPU of 24 GiB": {
        "trainer": {"mode": "sync"},
        "gpu_memory": {"budget_gib": 24},
        "learner": {"device": "cuda:0"},
    },
    "adapters": {"model": {"lora": {"rank": 8}}},
}


def check_arguments(folder: Path) -> str:
    """vLLM makes its whole configuration of our arguments, with our numbers in it, and takes our ban of tokens."""
    from transformers import AutoConfig
    from vllm.config.weight_transfer import WeightTransferConfig  # pyright: ignore[reportMissingImports]
    from vllm.engine.arg_utils import AsyncEngineArgs  # pyright: ignore[reportMissingImports]

    from asyncrl_plugins.vllm.engine_process import BACKEND
    from asyncrl_plugins.vllm.memory import step_tokens
    from asyncrl_plugins.vllm.start import engine_arguments
    from tests.rigs.tiny import make_tiny_model, small_config

    model, data = make_tiny_model(folder / "tiny"), folder / "data"
    text_config = AutoConfig.from_pretrained(model).get_text_config()
    said = []
    for name, sections in CASES.items():
        rollout = {"engine": "vllm", "device": "cuda:0", "max_concurrent_sequences": 64}
        config = small_config(model, data, folder / "run", **{"rollout": rollout, **sections})
        told = engine_arguments(config, cuda=True, text_config=text_config, banned=[BANNED])
        made = AsyncEngineArgs(
            **told, weight_transfer_config=WeightTransferConfig(backend=BACKEND)
        ).create_engine_config()
        assert made.scheduler_config.max_num_batched_tokens == step_tokens(config)
        assert made.compilation_config.cudagraph_capture_sizes == told["cudagraph_capture_sizes"]
        assert made.cache_config.enable_prefix_caching
        assert made.model_config.logprobs_mode == "processed_logprobs"
        check_ban(made)
        graphs = made.compilation_config.cudagraph_mode.name
        said.append(f"{name}: {made.scheduler_config.max_num_batched_tokens} tokens a step, graphs {graphs}")
    return "; ".join(said)


def made_by_runner(vllm_config: Any, processors: Any) -> Any:
    """Logits processor as vLLM's Model Runner V2 makes it, of the one that is named."""
    import torch
    from vllm.v1.worker.gpu.sample.logits_processor import (  # pyright: ignore[reportMissingImports]
        build_custom_logits_processors,
    )
    from vllm.v1.worker.gpu.sample.logits_processor.interface import (  # pyright: ignore[reportMissingImports]
        LogitsProcRequestState,
    )

    fields: dict[str, Any] = dict.fromkeys(field.name for field in dataclasses.fields(LogitsProcRequestState))
    state: Any = SimpleNamespace(**{**fields, "device": torch.device("cpu")})
    (ban,) = build_custom_logits_processors(vllm_config, state, False, processors)
    return ban


def check_ban(made: Any) -> None:
    """The model runner of CUDA makes our processor, which leaves the banned id no probability."""
    import torch
    from vllm.sampling_params import SamplingParams  # pyright: ignore[reportMissingImports]

    ban = made_by_runner(made, made.model_config.logits_processors)
    assert ban.add_request(0, SamplingParams())
    after = ban.apply(torch.zeros(1, 10), None)
    assert after.isneginf().nonzero()[:, 1].tolist() == [BANNED]


def inside() -> int:
    """All checks, in a process that has the stand-ins; a line for each."""
    fake_device()
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        for check in (check_libraries, check_worker, check_arguments):
            try:
                outcome = check(Path(folder))
            except Exception:
                outcome, failed = f"FAILED\n{traceback.format_exc()}", failed + 1
            print(f"{check.__name__.removeprefix('check_')}: {outcome}", flush=True)
    return failed


def main() -> int:
    if sys.argv[1:] == ["inside"]:
        return inside()
    print(", ".join(f"{name} {version(name)}" for name in ("vllm", "torch", "transformers")), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        build_driver(Path(folder))
        environment = os.environ | {
            "LD_LIBRARY_PATH": folder,
            "CUDA_VISIBLE_DEVICES": "0",
            "VLLM_LOGGING_LEVEL": "ERROR",
        }
        return subprocess.run([sys.executable, "-m", "tests.rigs.cuda_stand_in", "inside"], env=environment).returncode


if __name__ == "__main__":
    raise SystemExit(main())
