"""The trained start of the demo of pictures: how it ships, and how it becomes a model again.

    python -m asyncrl_plugins.demos.start apply COMPOSED TARGET [--start START]
    python -m asyncrl_plugins.demos.start ship ALIGNED TRAINED [--start START] [--rank 4]

START holds a vision tower, a connector, and the language model's update by supervised training: the factors of each
weight's low-rank difference, float16. `ship` finds them by a singular value decomposition of TRAINED minus ALIGNED, so
that the update of an adapter of that rank is kept whole.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from asyncrl.launch.command import command

START = Path(__file__).parent / "start"
TOWER, CONNECTOR, UPDATE = "tower", "connector.safetensors", "language_update.safetensors"
LANGUAGE = "language_model."
"""Part of the names of the language model's weights."""


def apply_update(composed: Path, start: Path, target: Path) -> None:
    """Write the composed model with the start's update of its language model."""
    from safetensors.torch import load_file
    from transformers import AutoProcessor

    from asyncrl.models.export import export_model

    model, factors = _load(composed), load_file(start / UPDATE)
    weights = dict(model.named_parameters())
    with torch.no_grad():
        for name in sorted(name.removesuffix(".left") for name in factors if name.endswith(".left")):
            weights[name] += factors[f"{name}.left"].float() @ factors[f"{name}.right"].float()
    export_model(model, AutoProcessor.from_pretrained(composed), target)


def ship(aligned: Path, trained: Path, start: Path, rank: int) -> float:
    """Write the start; returns the largest relative error of an updated weight's difference."""
    from safetensors.torch import save_file
    from transformers import AutoImageProcessor

    before, after = _load(aligned), _load(trained)
    inner, worst, factors = before.model, 0.0, {}
    old = dict(before.named_parameters())
    for name, weight in after.named_parameters():
        if LANGUAGE not in name or torch.equal(weight, old[name]):
            continue
        difference = (weight - old[name]).detach()
        left, values, right = torch.linalg.svd(difference, full_matrices=False)
        root = values[:rank].sqrt()
        pair = (left[:, :rank] * root).half().contiguous(), (root[:, None] * right[:rank]).half().contiguous()
        error = float((pair[0].float() @ pair[1].float() - difference).norm() / difference.norm())
        worst, factors[f"{name}.left"], factors[f"{name}.right"] = max(worst, error), *pair
    start.mkdir(parents=True, exist_ok=True)
    inner.vision_tower.half().save_pretrained(start / TOWER)
    AutoImageProcessor.from_pretrained(aligned).save_pretrained(start / TOWER)
    connector = {name: value.half().contiguous() for name, value in inner.multi_modal_projector.state_dict().items()}
    save_file(connector, start / CONNECTOR)
    save_file(factors, start / UPDATE)
    return worst


def _load(folder: Path) -> Any:
    from asyncrl.config.sections import ModelConfig
    from asyncrl.models.loading import load_model

    return load_model(ModelConfig(path=str(folder), dtype="float32"), device=torch.device("cpu"))


@command
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    stages = parser.add_subparsers(required=True, dest="stage")
    applied, shipped = stages.add_parser("apply"), stages.add_parser("ship")
    applied.add_argument("composed", type=Path)
    applied.add_argument("target", type=Path)
    shipped.add_argument("aligned", type=Path)
    shipped.add_argument("trained", type=Path)
    shipped.add_argument("--rank", type=int, default=8)
    for stage in (applied, shipped):
        stage.add_argument("--start", type=Path, default=START)
    arguments = parser.parse_args(argv)
    if arguments.stage == "apply":
        apply_update(arguments.composed, arguments.start, arguments.target)
    else:
        error = ship(arguments.aligned, arguments.trained, arguments.start, arguments.rank)
        print(f"{arguments.start}: largest relative error of an update {error:.2e}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
