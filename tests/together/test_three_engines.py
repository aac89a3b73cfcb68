"""SGLang, vLLM and the hf engine on the same prompts and weights."""

from __future__ import annotations

from rollout_server.engines.hf.engine import HFEngine
from tests.plugins.sglang.sglang_rig import NEEDS_SGLANG, SGLangRig
from tests.plugins.vllm.vllm_rig import NEEDS_VLLM, VLLMRig
from tests.rigs.engine_checks import check_same_completions, completions_of, recorded_requests

pytestmark = [*NEEDS_SGLANG, *NEEDS_VLLM]


def test_recorded_prompts_get_the_same_tokens_and_logprobs_of_all_three(sglang: SGLangRig) -> None:
    stops = (7, sglang.processor.tokenizer.eos_token_id)  # at the end of text SGLang ends in any case
    requests = recorded_requests(sglang, stops)
    ours = sglang.sample(*requests)
    for engine in (HFEngine(sglang.config, sglang.processor), VLLMRig.make_engine(sglang)):
        check_same_completions(requests, ours, completions_of(engine, sglang, requests))
