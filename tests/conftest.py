"""Fixtures: a tiny vision-language model, digit data, and configurations that use them."""

from __future__ import annotations

import gc
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.installed_methods import methods
from asyncrl.config.parts import ROLLOUT_ENGINES
from asyncrl.config.schema import RunConfig
from tests.rigs.forked_workers import fork_workers
from tests.rigs.prefork import share_forks
from tests.rigs.scripted_path import install_scripted_engine
from tests.rigs.small_runs import logs
from tests.rigs.tiny import ROOT, make_digits, make_tiny_model, small_config
from tests.rigs.two_processes import run_both

__all__ = ["ROOT", "small_config"]

install_scripted_engine()

LONGEST = (
    "test_three_engines test_sglang_engine test_vllm_end_to_end test_vllm_device_channel test_vllm_video "
    "test_vllm_conversation test_vllm_engine test_vllm_lora test_vllm_agents test_vllm_quantization test_zero "
    "test_time_and_peers test_gpu_quarter_hour test_ranks test_sync test_resume test_torchrun test_demo test_vqa_demo "
    "test_zero_families test_sglang_end_to_end test_sleeping_ranks test_memory_on_ranks test_lora_runs "
    "test_fuzz_wire test_zero_runs test_inspect_page test_compose_run test_supervisor test_zero_memory "
    "test_mcp_environment test_end_to_end test_checkpoint_writing test_tiled_families test_segments "
    "test_runs_on_a_base test_finished_run test_replay test_run_scores test_cli_commands test_memory_plan_ranks "
    "test_families_on_ranks test_agent test_zero_vision test_environment_pool test_chaos test_chaos_of_relays "
    "test_docs_commands test_changed_surroundings test_sft_on_ranks test_weight_relays test_panel "
    "test_sample_store test_third_party_plugin test_every_method test_report_browser test_vqa_from_scratch"
)
"""Files that take longest, which begin first: no worker ends alone with one of them."""

SHARED = {
    "test_vllm_end_to_end": "vLLM",  # imported once
    "test_vllm_device_channel": "vLLM",
    "test_vllm_video": "vLLM",
    "test_vllm_conversation": "vLLM",
    "test_vllm_engine": "vLLM",  # the last test kills it
    "test_vllm_lora": "vLLM",  # it starts its own
    "test_vllm_agents": "vLLM",  # as the one before
    "test_vllm_quantization": "vLLM",
    "test_three_engines": "vLLM",  # and SGLang
    "test_sglang_engine": "vLLM",  # SGLang, which the last test kills
    "test_finished_run": "finished run",
    "test_replay": "finished run",
    "test_run_scores": "finished run",
    "test_resume": "on-policy run",
    "test_sync": "on-policy run",
}
"""Files that one worker gets together: what they share is made once for a worker."""


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("numprocesses", None):
        share_forks()
        fork_workers()
    else:
        gc.disable()  # until all is imported: none of it is garbage


def pytest_collection_finish() -> None:
    """Imported modules stay: no collection of a test looks at it. Falling asleep and waking collect, too."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {stem: place for place, stem in enumerate(LONGEST.split())}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu and (missing := without_gpu()):
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason=missing))


def without_gpu() -> str:
    """Reason to skip tests marked `gpu`, or nothing: their halves on the CPU run everywhere."""
    import torch

    return "" if torch.cuda.is_available() else f"torch {torch.__version__} sees no CUDA device"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each file to one worker, in the order above, and the next file to the first worker that is free."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return SHARED.get(Path(file).stem, file)

        def _reschedule(self, node: Any) -> None:
            """A worker begins a test when it knows the one after: it needs two, where xdist sends it a third."""
            if not self.workqueue or self._pending_of(self.assigned_work[node]) < 2:
                super()._reschedule(node)

    config.option.loadscopereorder = False
    return ByFile(config, log)


@pytest.fixture(scope="session", autouse=True)
def cache_of_the_tests(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Folder of what surveys of rows remember, also in the processes that tests start."""
    os.environ["ASYNCRL_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2-VL folder of 0.2 M parameters, with tokenizer and processor."""
    folder = make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")
    gc.freeze()  # torch and transformers import more for a first model
    return folder


@pytest.fixture(scope="session")
def digits_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with sft.parquet, rl.parquet and eval.parquet."""
    return make_digits(tmp_path_factory.mktemp("data"))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Sums in one order: results repeat."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def make_config(tiny_model: Path, digits_data: Path, tmp_path: Path) -> Callable[..., RunConfig]:
    """A small valid configuration; keyword arguments replace keys of its sections."""
    return partial(small_config, tiny_model, digits_data, tmp_path / "run")


@pytest.fixture
def wide_hf(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hf engine may spread a model over devices, as a plug-in's engine does."""
    monkeypatch.setitem(ROLLOUT_ENGINES.built_in, "hf", replace(ROLLOUT_ENGINES["hf"], spans_devices=True))


@pytest.fixture(scope="session")
def finished_run(tiny_model: Path, digits_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real run of five steps, with checkpoints of steps 4 and 5, for tests that only read it."""
    run = tmp_path_factory.mktemp("finished") / "run"
    settings = {"patience": 1, "kl_low": 1, "kl_high": 2}
    moving_bound = {name: settings for name in methods("staleness_controller") if name == "adaptive_staleness"}
    config = small_config(
        tiny_model,
        digits_data,
        run,
        learner={"cpu_threads": 2, "max_staleness": 3},
        algorithm={"updates_per_batch": 2, **moving_bound},
        evaluation={"before_training": True},
        trainer={"max_steps": 5, "save_freq": 2, "samples_per_step": 1},
    )
    assert run_both(config, run) == (0, 0), logs(run)
    return run


@pytest.fixture(scope="session")
def tied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.rigs.tiny_families import make_family

    return make_family("qwen2_5_vl", tmp_path_factory.mktemp("tied") / "model", tied=True)


@pytest.fixture
def emptied_device() -> Iterator[None]:
    """Nothing of an earlier test is on the device, and nothing of this one stays."""
    from asyncrl.devices.device import free_caches, resolve_device

    free_caches(resolve_device("auto"))
    yield
    free_caches(resolve_device("auto"))


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str, str], Path]:
    """Makes a model of a size and dtype on a device once."""
    from asyncrl.devices.device import free_caches, resolve_device
    from benchmarks.random_models import make_model

    made: dict[tuple[str, str], Path] = {}

    def make(size: str, dtype: str, device: str) -> Path:
        if (size, dtype) not in made:
            folder = tmp_path_factory.mktemp("random") / size
            made[size, dtype] = make_model(folder, size, dtype=dtype, device=device)
            free_caches(resolve_device("auto"))
        return made[size, dtype]

    return make


# --- engines of plug-ins: started once for a session -------------------------------------------------------------


@pytest.fixture(scope="session")
def started_vllm(tied_model: Path, digits_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A real vLLM: a start takes half a minute. Its model is of the family whose positions depend on frames per second,
    with an output layer of which vLLM keeps a packed copy; images are made small. Runs in test_vllm_end_to_end.py and
    adapters in test_vllm_lora.py are of a qwen2_vl without either."""
    from tests.plugins.vllm.vllm_rig import MAX_PIXELS, VLLMRig, vllm_config
    from tests.rigs.policies import initial_weights

    config = vllm_config(
        tied_model,
        digits_data,
        tmp_path_factory.mktemp("vllm") / "run",
        model={"max_pixels": MAX_PIXELS},
        learner={"wait_timeout_s": 60},
        network={"timeout_s": 10},
    )
    rig = VLLMRig(config, initial_weights(config))
    yield rig
    rig.close()


@pytest.fixture
def rig(started_vllm: Any) -> Any:
    """The session's vLLM with the initial weights and the default mode."""
    started_vllm.make_ready()
    return started_vllm


@pytest.fixture(scope="session")
def started_sglang(digits_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A real SGLang: a start takes a minute. SGLang's Qwen2.5-VL knows patches of 14 pixels."""
    from tests.plugins.sglang.sglang_rig import SGLangRig
    from tests.rigs.policies import initial_weights
    from tests.rigs.tiny_families import make_family

    folder = tmp_path_factory.mktemp("sglang")
    model = make_family("qwen2_5_vl", folder / "model", tied=True, patch=14)
    rollout = {"engine": "sglang", "max_concurrent_sequences": 32}
    config = small_config(model, digits_data, folder / "run", data={"max_response_length": 384}, rollout=rollout)
    rig = SGLangRig(config, initial_weights(config))
    yield rig
    rig.close()


@pytest.fixture
def sglang(started_sglang: Any) -> Any:
    """The session's SGLang with the initial weights and the default mode."""
    started_sglang.make_ready()
    started_sglang.answers.clear()
    return started_sglang
