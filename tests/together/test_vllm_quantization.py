"""Weights of 8 bits in the vllm engine through live updates, with the real vLLM on a CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from asyncrl.config.schema import RunConfig
from asyncrl.devices.device import MEAN_SHARE
from rollout_server.engines.base import Completion, GenerationRequest
from tests.conftest import small_config
from tests.plugins.vllm.vllm_rig import NEEDS_VLLM, VLLMRig
from tests.rigs.alignment_rig import limit_of
from tests.rigs.engine_rig import QUESTION
from tests.rigs.policies import Weights, gaps, initial_weights, moved, picture

pytestmark = NEEDS_VLLM


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_weights_are_quantised_anew_from_each_version(
    tiny_model: Path, digits_data: Path, tmp_path: Path, kind: str
) -> None:
    """An update to weights that it has had gives what it gave when it started with them, bit for bit: no scale stays.
    The versions between them have other magnitudes."""
    config = small_config(
        tiny_model,
        digits_data,
        tmp_path / "run",
        model={"dtype": "bfloat16"},
        data={"max_response_length": 128},
        rollout={"engine": "vllm", "quantization": kind, "max_concurrent_sequences": 32},
    )
    initial = initial_weights(config)
    far = {name: tensor.bfloat16() for name, tensor in moved(initial, 1, by=2.0).items()}
    small = {name: 0.5 * tensor if "proj" in name else tensor for name, tensor in initial.items()}
    rig = VLLMRig(config, initial)
    try:
        requests = [rig.request(QUESTION, picture(n), tokens=40, size=2, temperature=1.0) for n in range(4)]
        fresh = rig.sample(*requests)
        check(config, requests, fresh, initial)
        for weights in (far, small):
            rig.run(rig.update(weights))
            done = rig.sample(*requests)
            check(config, requests, done, weights)
            assert any(done[key].token_ids.tolist() != fresh[key].token_ids.tolist() for key in fresh)
        rig.run(rig.update(initial))
        for key, completion in rig.sample(*requests).items():
            assert completion.token_ids.tolist() == fresh[key].token_ids.tolist()
            assert completion.logprobs.tolist() == fresh[key].logprobs.tolist()
    finally:
        rig.close()


def check(
    config: RunConfig, requests: list[GenerationRequest], done: dict[tuple[int, int], Completion], weights: Weights
) -> None:
    """Log-probs are near those of the weights."""
    found = []
    for request in requests:
        for index in range(request.group_size):
            completion = done[request.request_id, index]
            found.append(gaps(config, dict.fromkeys(completion.versions.tolist(), weights), request, completion))
    difference = np.concatenate(found)
    limit = limit_of(config)
    assert 1e-3 < difference.max() < limit
    assert difference.mean() < MEAN_SHARE * limit
