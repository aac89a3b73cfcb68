"""The demo: `asyncrl demo`. A small vision-language model learns to compute with handwritten digits.

Reading order: `data` (images, questions, answers) -> `model` (a small Qwen2-VL) -> `reward` (of a completion)
-> `prepare` (data and warm start, each a command) -> `command` (all of it, scores of the warm start, GRPO and a check
of the export).
"""

from asyncrl.processing import torchvision_cpu

torchvision_cpu.install()  # before a module of this package imports transformers
