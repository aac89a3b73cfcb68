"""Descriptions of the command `asyncrl compose` and of the models that it makes."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path

from asyncrl.plugins import Command, ModelFamily


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("target", type=Path, help="new Hugging Face folder")
    parser.add_argument("parts", nargs="+", metavar="FILE|key=value", help="such as vision_tower=DIR, in YAML or here")


COMMAND = Command(
    help="make a vision-language model of a vision tower and a language model",
    run="asyncrl_plugins.compose.command:run",
    add_arguments=_add_arguments,
)
MODULAR = ModelFamily(
    register="asyncrl_plugins.compose.modular_vlm:register",
    images="asyncrl.processing.image_grids:FixedGrids",
    unserved={"vllm": "LLaVA with two towers, a resampler, a Q-Former or a bias in its output layer"},
)
