"""Weights of lower precision: rollouts with 8 bits (`fp8`, `int8`; decision 027), a base of 4 bits below adapters
(`nf4`; decision 030).

Reading order: `plugin` (descriptions, refusals), `grid` (the rounding to 8 bits), `vllm_rules` and `vllm_int8` (in
vLLM); `nf4` (the base in learner and engines), `nf4_plan` (its memory), `nf4_card` (README.md beside an export).
"""
