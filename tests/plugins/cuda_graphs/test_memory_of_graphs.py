"""The memory plan against the tensors of a batch whose memory stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from asyncrl.config.parts import cache_columns
from asyncrl.memory_plan.lines import HF_MEMORY
from asyncrl.memory_plan.live_bytes import LiveBytes, nbytes
from asyncrl.memory_plan.rehearsal import rehearse
from asyncrl.models.loading import load_model
from asyncrl_plugins.cuda_graphs.batch import GraphedBatch
from asyncrl_plugins.cuda_graphs.choice import most_slots
from asyncrl_plugins.cuda_graphs.graphs import MOST_GRAPHS, StepGraphs
from asyncrl_plugins.cuda_graphs.memory import LAYER_BYTES
from benchmarks.random_models import make_model
from protocol.messages import Sampling
from rollout_server.engines.base import GenerationRequest
from tests.rigs.full_micro_batch import image_prompt
from tests.rigs.policies import CPU, MakeConfig

PROMPT, RESPONSE, SEQUENCES = 64, 30, 6
GRAPHS, KEPT = "CUDA graphs", "KV cache during prefill"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "tiny", "tiny")


def cuda_bytes(folder: Path) -> int:
    """Bytes that CUDA itself takes for graphs of the model in `folder`."""
    return MOST_GRAPHS * AutoConfig.from_pretrained(folder).text_config.num_hidden_layers * LAYER_BYTES


def sections(folder: Path, **rollout: Any) -> dict[str, dict[str, Any]]:
    """Sections of a run whose server may be on a GPU."""
    return {
        "model": {"path": str(folder)},
        "data": {"max_prompt_length": PROMPT, "max_response_length": RESPONSE, "val_files": []},
        "batch": {"group_size": 3},
        "rollout": {"device": "auto", "max_concurrent_sequences": SEQUENCES, **rollout},
    }


def test_a_batch_takes_what_was_planned(make_config: MakeConfig, small: Path) -> None:
    """In the second round prompts are prefilled beside the memory of the first one's sequences."""
    config = make_config(**sections(small))
    planned = rehearse(config)
    lines = {line.name: line.nbytes for line in HF_MEMORY.lines(planned, config, 1)}
    assert lines[KEPT] == SEQUENCES * (PROMPT + RESPONSE) * planned.cache_per_token // 4, "a prefill is most here"
    model: Any = load_model(config.model, device=CPU).eval().requires_grad_(False)
    sampling = Sampling(temperature=1.0, max_new_tokens=RESPONSE, stop_token_ids=(), banned_token_ids=())
    requests = [GenerationRequest(i, image_prompt(model, PROMPT), 3, i, sampling) for i in range(2)]
    with LiveBytes("cpu", known=[*model.parameters(), *model.buffers()]) as live:
        batch = GraphedBatch(model, (), CPU, most=most_slots(config), graphs=StepGraphs(None))
        for _ in range(2):
            batch.join(batch.prefill(requests, 0))
            while batch.rows:
                batch.step(0)
        cached = nbytes(tensor.memory for tensor in batch._slots._tensors())
    assert cached == SEQUENCES * cache_columns(PROMPT + RESPONSE) * planned.cache_per_token == lines["KV cache"]
    tensors = lines[GRAPHS] - cuda_bytes(small)  # without what CUDA takes
    most = lines["KV cache"] + lines["working memory"] + lines[KEPT] + tensors
    assert live.peak <= most <= 2 * live.peak


@pytest.mark.parametrize(
    "rollout", [{"device": "cpu"}, {"engine_args": {"enforce_eager": True}}], ids=["a CPU", "enforce_eager"]
)
def test_steps_that_are_not_captured_take_nothing(make_config: MakeConfig, small: Path, rollout: Any) -> None:
    config = make_config(**sections(small, **rollout))
    names = {line.name for line in HF_MEMORY.lines(rehearse(config), config, 1)}
    assert not names & {GRAPHS, KEPT}


def test_an_output_layer_that_is_widened_in_the_pool_is_counted(make_config: MakeConfig, small: Path) -> None:
    given = sections(small)
    given["model"] |= {"dtype": "bfloat16"}
    counted = []
    for float32_head in (False, True):
        given["model"]["float32_head"] = float32_head
        config = make_config(**given)
        model = rehearse(config)
        lines = {line.name: line.nbytes for line in HF_MEMORY.lines(model, config, 1)}
        counted.append(lines[GRAPHS] - cuda_bytes(small))
    logits = SEQUENCES * model.vocabulary
    hidden = AutoConfig.from_pretrained(small).text_config.hidden_size
    assert counted == [2 * 2 * logits, 2 * 4 * logits + 4 * model.vocabulary * hidden]


def test_the_argument_is_true_or_false(make_config: MakeConfig) -> None:
    with pytest.raises(ValueError, match=r"rollout.engine_args.enforce_eager is 'no', not true or false. Set it to"):
        make_config(rollout={"engine_args": {"enforce_eager": "no"}})
    with pytest.raises(ValueError, match="beside enforce_eager the hf engine takes no arguments"):
        make_config(rollout={"engine_args": {"max_num_seqs": 4}})
