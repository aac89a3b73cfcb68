"""Run in a process of its own: sample from vLLM with adapters from PEFT folders.

    python -m tests.vllm_lora MODEL PROMPTS.json FOLDER ...

What was sampled from each folder's adapter goes to the file that PROMPTS.json names as `out`.

vLLM wants its switches in the environment before it is imported, and keeps a process for itself.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def main(model: str, prompts_file: str, *folders: str) -> None:
    from asyncrl.models import torchvision_cpu

    torchvision_cpu.install()
    from PIL import Image
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    given = json.loads(Path(prompts_file).read_text())
    engine = LLM(
        model=model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        limit_mm_per_prompt={"image": 2, "video": 0},
        logprobs_mode="processed_logprobs",
        enable_lora=True,
        enable_tower_connector_lora=given["tower"],
        max_lora_rank=8,
        max_loras=2,
        max_cpu_loras=2,
    )
    sampling = SamplingParams(
        max_tokens=24,
        temperature=given["temperature"],
        seed=1,
        logprobs=0,
        ignore_eos=True,
        logit_bias={int(token): -100.0 for token in given["banned"]},
    )
    inputs = []
    for one in given["prompts"]:
        images = {"multi_modal_data": {"image": [Image.open(file) for file in one["images"]]}} if one["images"] else {}
        inputs.append({"prompt": one["text"], **images})
    results = []
    for number, folder in enumerate(folders, 1):
        adapter = LoRARequest(Path(folder).name, number, folder)
        done = engine.generate(inputs, sampling, lora_request=adapter, use_tqdm=False)
        results.append([_as_dict(o.prompt_token_ids, o.outputs[0]) for o in done])
    Path(given["out"]).write_text(json.dumps(results))


def _as_dict(prompt: Any, output: Any) -> dict[str, Any]:
    chosen = [at[token].logprob for at, token in zip(output.logprobs, output.token_ids, strict=True)]
    return {"prompt": list(prompt), "tokens": list(output.token_ids), "logprobs": chosen}


if __name__ == "__main__":
    main(*sys.argv[1:])
