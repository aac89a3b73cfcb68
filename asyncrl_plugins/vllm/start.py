"""Start of vLLM, with arguments and an environment from the configuration, and death of its core."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import psutil
import torch

from asyncrl.config.installed_methods import chosen_hooks
from asyncrl.config.parts import ROLLOUT_WEIGHTS, device_channels
from asyncrl.config.schema import RunConfig
from asyncrl.errors import UserError
from asyncrl.memory_plan import GIB
from asyncrl.memory_plan.lines import CONTEXT_BYTES
from asyncrl.memory_plan.plan import device_sharing
from asyncrl.memory_plan.token_choice import settle_tokens
from asyncrl.model_files.folder import model_folder
from asyncrl.models.loading import skeleton, torch_dtype
from asyncrl.models.parts import CONNECTOR_NAMES, VISION_TOWER_NAMES, part_of
from asyncrl.models.published import published_tensors
from asyncrl_plugins.vllm.engine_process import (
    BACKEND,
    BANNED_KEY,
    LEASE_VARIABLE,
    MODULES_VARIABLE,
    OWNER_VARIABLE,
    import_modules,
)
from asyncrl_plugins.vllm.memory import OFFLOADS_GRAPHS, cache_bytes, graph_sizes, memory_utilization, step_tokens
from asyncrl_plugins.vllm.plugin import LARGEST_RANK, ROUTED_EXPERTS
from asyncrl_plugins.vllm.sent_media import KEPT_GIB
from protocol.messages import AdapterSpec
from rollout_server.engines.base import EngineDied

WORKER = "asyncrl_plugins.vllm.worker"
"""The module that vLLM's workers import; this process, which may not touch their devices, must not."""
BANNED_TOKENS = "asyncrl_plugins.vllm.banned_tokens:BannedTokens"
SCHEDULER = "asyncrl_plugins.vllm.scheduler.scheduler"
CPU_KV_BLOCK = 128
"""Tokens of one block of vLLM's key-value cache on a CPU."""
CPU_BATCH_TOKENS = 4096
"""Prompt tokens of one prefill step on a CPU, unless one sequence needs more."""
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, LARGEST_RANK)
"""Ranks that vLLM has slots for."""
VLLM_SHARE = 0.92
"""vLLM's own default of gpu_memory_utilization."""
DEAD = "vLLM's engine process has died; see the end of the server's log"
CHECK_EVERY_S = 1.0
SAY_EVERY_S = 60.0
logger = logging.getLogger(__name__)
T = TypeVar("T")


def engine_arguments(config: RunConfig, *, cuda: bool, text_config: Any, banned: list[int]) -> dict[str, Any]:
    """Keyword arguments of vLLM's AsyncEngineArgs, without weight transfer; `rollout.engine_args` come last."""
    rollout = config.rollout
    tokens = config.data.max_prompt_length + config.longest_completion
    pixel_limits = config.model.pixel_limits
    arguments: dict[str, Any] = {
        "model": config.model.path,
        "trust_remote_code": config.model.trust_remote_code,
        "dtype": str(torch_dtype(config.model)).removeprefix("torch."),  # vLLM knows an `auto` of its own
        "max_model_len": tokens,
        "max_num_seqs": rollout.max_concurrent_sequences,
        "tensor_parallel_size": rollout.tensor_parallel_size,
        "seed": config.trainer.seed,
        # Log-probs of the distribution that is sampled from: after bans, temperature and truncation.
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "enable_prefix_caching": True,
        "mm_processor_cache_gb": KEPT_GIB,
        # For images alone: a flat limit would be one for videos, too. By names that transformers drops in 5.23: vLLM
        # caches processors by their arguments, and could not hash a `size` in this mapping.
        "mm_processor_kwargs": {"images_kwargs": pixel_limits} if pixel_limits else None,
        # On the device vLLM normalises videos as images, whatever the video processor says.
        "mm_device_do_normalize": False,
        "worker_extension_cls": f"{WORKER}.WorkerExtension",
        "logits_processors": [BANNED_TOKENS],
        "additional_config": {BANNED_KEY: banned},
        "use_tqdm_on_load": False,  # progress bars in a log
        "enable_log_requests": False,
        "disable_log_stats": False,
    }
    if cuda:
        arguments["max_num_batched_tokens"] = step_tokens(config)  # vLLM's own number depends on who starts it
        if not set(rollout.engine_args) & {"compilation_config", "enforce_eager"}:
            arguments["cudagraph_capture_sizes"] = graph_sizes(rollout.max_concurrent_sequences)
        if config.trainer.mode == "sync":  # else nobody sleeps, and vLLM's allocator for it only costs memory
            arguments |= {"enable_sleep_mode": True, OFFLOADS_GRAPHS: True}  # vLLM's CPU platform refuses both
        if config.gpu_memory.budget_gib:
            total = torch.cuda.get_device_properties(0).total_memory
            settled = settle_tokens(config)[0]
            arguments["gpu_memory_utilization"] = memory_utilization(settled, total)
            if device_sharing(settled) != "apart":
                # vLLM would measure what its profiling pass takes, and ends where another process frees memory then.
                arguments["kv_cache_memory_bytes"] = cache_bytes(settled, total)
        elif not set(rollout.engine_args) & {"gpu_memory_utilization", "kv_cache_memory_bytes"}:
            total = torch.cuda.get_device_properties(0).total_memory
            arguments["gpu_memory_utilization"] = share_beside_a_version(config, total)
    else:
        arguments |= {
            "enforce_eager": True,  # compilation costs half a minute of start for a tenth of speed
            # A chunk's sampled token is discarded and its random number taken back, which a CPU generator cannot do.
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(tokens, CPU_BATCH_TOKENS),
        }
        if not os.environ.get("VLLM_CPU_KVCACHE_SPACE"):
            arguments["kv_cache_memory_bytes"] = cpu_kv_bytes(text_config, config.model.dtype, config)
    if not cuda or os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "0":
        arguments["scheduler_cls"] = SCHEDULER
    if ROUTED_EXPERTS in chosen_hooks("token_trace", config.algorithm):
        arguments["enable_return_routed_experts"] = True
    if weights := ROLLOUT_WEIGHTS.find(rollout.quantization):
        arguments |= {
            "quantization": "online",
            "quantization_config": {
                "linear": {"weight": weights.held_by["vllm"]["scheme"]},
                "ignore": [rf"re:(.*\.)?({'|'.join(VISION_TOWER_NAMES + CONNECTOR_NAMES)})\."],
            },
        }
    return arguments | rollout.engine_args


def share_beside_a_version(config: RunConfig, device_bytes: int) -> float:
    """vLLM's `gpu_memory_utilization` without a budget: its own default, less a version that arrives beside the model
    where one can (docs/decisions/013).

    With rollout.weights_channel=auto the version gets at most half of what vLLM has beside its weights: else it would
    be too little for sequences, and weights come over another channel.
    """
    rollout = config.rollout
    turns = config.trainer.mode == "sync" or config.model.lora.rank > 0
    closed = config.learner.device == "cpu" or not config.network.is_open
    channels = device_channels(rollout.weights_channel)
    if turns or closed or not channels:
        return VLLM_SHARE
    version = sum(tensor.nbytes for _, tensor in published_tensors(skeleton(config.model)))
    arriving = version + max(channel.own_bytes for channel in channels.values())
    beside_weights = VLLM_SHARE * device_bytes - version / rollout.tensor_parallel_size
    # What lies beyond vLLM's share is free already, but for the context that this process and CUDA take.
    missing = max(0.0, arriving - (1 - VLLM_SHARE) * device_bytes + CONTEXT_BYTES)
    if rollout.weights_channel == "auto" and missing > beside_weights / 2:
        return VLLM_SHARE
    share = math.floor((VLLM_SHARE - missing / device_bytes) * 1000) / 1000
    if share <= 0:
        raise UserError(
            f"rollout.weights_channel is {rollout.weights_channel}, over which a version of {version / GIB:.1f} GiB "
            f"arrives beside vLLM's model, on a GPU of {device_bytes / GIB:.1f} GiB. Set rollout.weights_channel=shm"
        )
    return share


def cpu_kv_bytes(text_config: Any, dtype: str, config: RunConfig) -> int:
    """Room for every concurrent sequence at full length, but no more than a quarter of the memory that is free.

    vLLM's own default on a CPU is nine tenths of all memory.
    """
    tokens = config.data.max_prompt_length + config.longest_completion
    blocks = -(-tokens // CPU_KV_BLOCK) * config.rollout.max_concurrent_sequences + 1  # vLLM keeps one for itself
    queries = text_config.num_attention_heads
    heads = getattr(text_config, "num_key_value_heads", None) or queries
    width = getattr(text_config, "head_dim", None) or text_config.hidden_size // queries
    per_token = 2 * text_config.num_hidden_layers * heads * width * getattr(torch, dtype).itemsize
    return min(blocks * CPU_KV_BLOCK * per_token, psutil.virtual_memory().available // 4)


def slot_arguments(spec: AdapterSpec) -> dict[str, Any]:
    """Arguments of vLLM for one slot of the smallest size that the adapter fits in."""
    return {
        "enable_lora": True,
        "max_lora_rank": next(rank for rank in RANKS if rank >= spec.rank),
        "max_loras": 1,
        "max_cpu_loras": 1,
        "enable_tower_connector_lora": any(
            part_of(name.split(".")) != "language_model" for name in spec.target_modules
        ),
    }


@contextmanager
def engine_environment(config: RunConfig, *, cuda: bool) -> Iterator[None]:
    """The environment in which vLLM starts its processes; what the user has set stays as it is.

    Ours is as before afterwards: vLLM preloads libraries into its workers through it, and processes that we start
    later, such as those of rewards, must not have them.
    """
    before = dict(os.environ)
    defaults = {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1"}
    defaults["VLLM_ENGINE_READY_TIMEOUT_S"] = str(math.ceil(config.start_timeout_s))  # its own is 600
    defaults["VLLM_FLOAT32_MATMUL_PRECISION"] = "highest"  # as the learner computes, which no TF32 product would equal
    if not cuda:
        # Its first request with log-probs would wait seconds for a compiler, even with enforce_eager.
        defaults["TORCH_COMPILE_DISABLE"] = "1"
        if config.rollout.tensor_parallel_size == 1:
            # One process less, and threads that are not bound to cores which the learner needs, too.
            defaults["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if config.rollout.cpu_threads:
        defaults["OMP_NUM_THREADS"] = str(config.rollout.cpu_threads)
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    if ROUTED_EXPERTS in chosen_hooks("token_trace", config.algorithm):
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"  # the other one, the default on a CPU, does not record them
    # Forked processes would import nothing anew, and would not watch their owner.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    os.environ[OWNER_VARIABLE] = str(os.getpid())
    weights = ROLLOUT_WEIGHTS.find(config.rollout.quantization)
    if module := weights.held_by["vllm"].get("module") if weights else None:
        os.environ[MODULES_VARIABLE] = module
    if config.trainer.mode == "sync":
        os.environ[LEASE_VARIABLE] = str(config.run_path.absolute())
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def start_vllm(
    config: RunConfig, adapter: AdapterSpec | None, banned: Sequence[int], statistics: Any, *, cuda: bool
) -> Any:
    """An `AsyncLLM`; many seconds. `statistics` is a stat logger of vLLM's.

    Raises UserError for a broken vLLM, and for what it does not know or cannot run.
    """
    from transformers import AutoConfig

    hf_config = AutoConfig.from_pretrained(model_folder(config.model), trust_remote_code=config.model.trust_remote_code)
    with engine_environment(config, cuda=cuda):
        try:
            from vllm.config.weight_transfer import WeightTransferConfig  # pyright: ignore[reportMissingImports]
            from vllm.engine.arg_utils import AsyncEngineArgs  # pyright: ignore[reportMissingImports]
            from vllm.v1.engine.async_llm import AsyncLLM  # pyright: ignore[reportMissingImports]
        except (ImportError, OSError) as error:
            raise UserError(
                f"vLLM is installed but cannot be imported: {type(error).__name__}: {error}. A library of another "
                "build stands beside it; make the environment anew: WITH_VLLM=1 bash scripts/install.sh"
            ) from error

        class AsyncEngine(AsyncLLM):
            """Shut down by `close` alone: at the end of the process the destructor's own modules are gone."""

            def __del__(self) -> None:
                pass

        import_modules()  # for a model in this process
        arguments = engine_arguments(config, cuda=cuda, text_config=hf_config.get_text_config(), banned=list(banned))
        arguments |= slot_arguments(adapter) if adapter else {}
        logger.info("starting vLLM with %s", arguments)
        transfer = None if adapter else WeightTransferConfig(backend=BACKEND)
        try:  # a failure within vLLM's own processes is neither of these here
            given = AsyncEngineArgs(**arguments, weight_transfer_config=transfer)
            if not cuda and "enable_prefix_caching" not in config.rollout.engine_args:
                # Recurrent states are cached between chunks of a prefill alone, and a CPU has it whole.
                given.enable_prefix_caching = not given.create_model_config().is_hybrid
            engine = AsyncEngine.from_engine_args(
                given,
                stat_loggers=cast(Any, [lambda _config, _index=0: statistics]),
            )
        except (TypeError, ValueError) as problem:
            raise UserError(f"vLLM refuses its arguments, such as rollout.engine_args: {problem}") from problem
        # Each prompt is processed whole, to be compared with ours: nothing is taken from a cache of processed items.
        engine.renderer._mm_processor_only_cache = None
        return engine


async def say_while_starting(start: asyncio.Future[Any], limit_s: float) -> None:
    """Return when vLLM's start has ended, in whatever way; until then log now and then that it goes on."""
    began = time.monotonic()
    while not start.done():
        await asyncio.wait({start}, timeout=SAY_EVERY_S)
        if not start.done():
            logger.info(
                "vLLM has been starting for %.0f s. The first start on a machine compiles for minutes, later ones find "
                "that in %s; the learner waits %g s (network.start_timeout_s)",
                time.monotonic() - began,
                os.environ.get("XDG_CACHE_HOME", "~/.cache"),
                limit_s,
            )


@contextmanager
def engine_death_translated() -> Iterator[None]:
    """Raises EngineDied for vLLM's own exception."""
    from vllm.v1.engine.exceptions import EngineDeadError  # pyright: ignore[reportMissingImports]

    try:
        yield
    except EngineDeadError as error:
        raise EngineDied(DEAD) from error


async def await_or_engine_death(llm: Any, call: Coroutine[Any, Any, T]) -> T:
    """Result of a call to vLLM's core. Raises EngineDied if the core dies meanwhile: vLLM would wait for ever."""
    task = asyncio.ensure_future(call)
    try:
        while not task.done():
            await asyncio.wait({task}, timeout=CHECK_EVERY_S)
            if llm.errored and not task.done():
                raise EngineDied(DEAD)
        return task.result()
    finally:
        task.cancel()
