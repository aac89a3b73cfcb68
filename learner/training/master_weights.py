"""Master weights: fp32 copies of trained 16-bit parameters, which the optimiser steps (arXiv 1710.03740, sec. 3.1).

A bf16 weight keeps 8 bits: AdamW's update of 1e-6 is a sixtieth of the distance between two neighbours at 0.02, and is
lost when it is added there. It adds up in the master; after each step the parameter is the master rounded. Forward,
backward and publication use the parameter, so learner and engine compute with the same bits.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch import nn

from asyncrl.errors import BadStateError, UserError
from asyncrl.run_folder.contents import export_advice


class MasterWeights:
    """The masters of a model's trained parameters. An fp32 parameter is its own master, and nothing is done for it."""

    def __init__(self, model: nn.Module):
        """Copy each trained 16-bit parameter; its gradients are from now on accumulated in fp32."""
        self._trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._copies: dict[str, torch.Tensor] = {}
        for name, parameter in self._trained.items():
            copy = self._copy(parameter)
            if copy is not None:
                parameter.grad_dtype = torch.float32
                self._copies[name] = copy

    def _copy(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """A parameter's master; None where it is its own."""
        return None if parameter.dtype == torch.float32 else parameter.detach().float()

    def stepped(self) -> list[torch.Tensor]:
        """Tensors for the optimiser, one for each trained parameter, in the model's order."""
        return [self._copies.get(name, parameter) for name, parameter in self._trained.items()]

    def copies(self) -> list[torch.Tensor]:
        """The masters that are not the parameters themselves: device memory besides the model's."""
        return list(self._copies.values())

    def take_gradients(self) -> None:
        """Move the gradients from the parameters to their masters."""
        for name, master in self._copies.items():
            parameter = self._trained[name]
            master.grad, parameter.grad = parameter.grad, None

    def norm(self) -> torch.Tensor:
        """Norm of the gradients that `take_gradients` has moved, of this process's parts."""
        return torch.nn.utils.get_total_norm([m.grad for m in self.stepped() if m.grad is not None])

    def drop_gradients(self) -> None:
        """Forget gradients that are not on the parameters any more."""

    @torch.no_grad()
    def round_into_parameters(self) -> None:
        """Set each parameter to its master, rounded to the nearest value of its dtype."""
        for name, master in self._copies.items():
            self._trained[name].copy_(master)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Masters by their parameters' names; empty for an fp32 model."""
        return dict(self._copies)

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, torch.Tensor], folder: Path) -> None:
        """Restore the masters; `folder` is the checkpoint's.

        Raises UserError where the checkpoint's parameters had other masters: its steps could not be made again.
        """
        self._check_names(state.keys(), self._copies.keys(), folder)
        for name, master in state.items():
            self._copies[name].copy_(master)

    def _dtypes(self) -> Mapping[str, torch.dtype]:
        """Compute dtypes of the parameters, by name."""
        return {name: parameter.dtype for name, parameter in self._trained.items()}

    def _check_names(self, theirs: Collection[str], ours: Collection[str], folder: Path) -> None:
        trained = {name: dtype for name, dtype in self._dtypes().items() if name in self._trained}
        check_masters(theirs, ours, trained, folder)


def check_masters(
    theirs: Collection[str], ours: Collection[str], trained: Mapping[str, torch.dtype], folder: Path
) -> None:
    """Raise UserError unless the checkpoint in `folder` has masters of the same parameters as the model here, whose
    trained ones have such dtypes."""
    differing = sorted(set(theirs) ^ set(ours))
    if differing:
        kind = "no fp32 master weights" if differing[0] in ours else "fp32 master weights"
        now = str(trained[differing[0]]).removeprefix("torch.") if differing[0] in trained else ""
        raise UserError(
            f"{folder} holds {kind} of {len(differing)} trained tensors, such as {differing[0]}, which is "
            f"{now or 'not trained'} now: it was written with another model.dtype, or by a version of asyncrl "
            "that stepped bfloat16 weights directly. Set model.dtype to what the run was started with, or start a "
            f"new run from it: {export_advice(folder.parent.parent)}"
        )


FIRST, LEAST, LARGEST = 2.0**16, 1.0, 2.0**24
GROWTH_UPDATES = 2000
"""Updates in a row with finite gradients after which the scale doubles."""


class LossScale:
    def __init__(self) -> None:
        self.value = FIRST
        self._good = 0

    def overflowed(self, grad_norm: float) -> dict[str, float]:
        """Halve the scale, and report. Raises BadStateError where it cannot fall any more: the gradient itself is not
        finite."""
        if self.value <= LEAST:
            raise BadStateError(
                f"the gradient norm is {grad_norm} at a loss scale of {self.value:g}, the least: it is not float16's "
                "range. The weights are those before this update. Look at the last samples and at logprob_diff_max in "
                "metrics.jsonl, or set model.dtype=bfloat16 in a new run"
            )
        self.value, self._good = self.value / 2, 0
        return {"loss_scale": self.value, "skipped_updates": 1.0}

    def went_well(self) -> dict[str, float]:
        """Count a finite gradient, and report."""
        self._good += 1
        if self._good >= GROWTH_UPDATES:
            self.value, self._good = min(LARGEST, 2 * self.value), 0
        return {"loss_scale": self.value, "skipped_updates": 0.0}

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value, "good": float(self._good)}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value, self._good = state["value"], int(state["good"])
