"""Descriptions of the demos `vqa` and `llm`."""

from __future__ import annotations

from asyncrl.plugins import Demo

VQA = Demo(
    help="SmolLM2-135M with a small vision tower on the benchmark easy-VQA",
    run="asyncrl_plugins.demos.vqa:demo",
    is_main=True,
)
LLM = Demo(
    help="SmolLM2-135M alone says in one short sentence what a thing is (`llm lora`: with adapters)",
    run="asyncrl_plugins.demos.llm:demo",
)
