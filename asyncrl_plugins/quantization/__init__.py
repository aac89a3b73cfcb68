"""Rollouts with weights of 8 bits: `fp8` and `int8` (decision 027).

Reading order: `plugin` (descriptions, refusals), `grid` (the rounding), `vllm_rules` and `vllm_int8` (in vLLM).
"""
