"""The demo: `asyncrl demo`. A small vision-language model learns to reckon with handwritten digits.

Reading order: `data` (images, questions, answers) -> `model` (a small Qwen2-VL) -> `reward` (of a completion)
-> `prepare` (data, model and warm start, each a command) -> `command` (all of it, then GRPO and a check of the export).
"""
