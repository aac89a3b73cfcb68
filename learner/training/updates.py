"""Updates of a model's weights: from a loss to gradients, their norm, AdamW on fp32 masters, and the learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from asyncrl.config.service_sections import OptimConfig, Optimizer
from learner.training.master_weights import LossScale, MasterWeights
from learner.training.optimizers import check_same_groups, check_same_moments, make_optimizer, parameter_groups
from learner.training.sharded_files import Write


class Updates(Protocol):
    """The gradients and the optimiser of a model. With several ranks every method but `stepped` is a collective."""

    begins_again: bool
    """Whether a pass that an error has ended can be made again."""

    def backward(self, loss: torch.Tensor) -> None:
        """Accumulate the gradient of a loss that is already divided by counts over all ranks: ranks are summed."""
        ...

    def step(self, check: Callable[[float], None]) -> dict[str, float]:
        """Clip, update, advance the schedule, clear gradients. Returns `grad_norm` (before clipping) and `lr`; in
        float16 `loss_scale` and `skipped_updates`, and no `grad_norm` where the update was left out.

        `check(grad_norm)` is called before a weight changes, and what it raises, on all ranks, leaves them as they are.
        """
        ...

    def drop_gradients(self) -> None: ...

    def forget_moments(self) -> None: ...

    def stepped(self) -> Iterator[torch.Tensor]:
        """Stepped tensors, fp32: of each trained parameter, in the model's order, the part that `Sharding.local`
        returns."""
        ...

    def copies(self) -> Iterator[torch.Tensor]:
        """Tensors beside the model's: masters and moments."""
        ...

    def files(self, name: str, *, copies: bool) -> Write:
        """Masters, moments and the schedule as they are now, in a file of that name and what lies beside it."""
        ...

    def load(self, file: Path) -> None:
        """Restore them; learning rate, decay and betas are those of our settings.

        Raises UserError where the checkpoint's weights had another dtype, or other parts a learning rate of their own.
        """
        ...


class StateParts(Protocol):
    """The division of parameters into parts, as the optimiser of PyTorch steps them."""

    load_device: torch.device

    def masters(self, model: Any) -> MasterWeights: ...

    def norm(self, local: torch.Tensor) -> torch.Tensor:
        """Norm of tensors of whose parts on this rank `local` is the norm."""
        ...

    def divided(self, local: torch.Tensor, parameter: torch.Tensor) -> Any:
        """Value for `state_files` of a tensor of which this rank has the same part as of a parameter."""
        ...

    def part(self, whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Part on this rank of a tensor from a file, divided as `like`, a parameter of its shape."""
        ...

    def state_files(self, state: Any, name: str, *, copies: bool) -> Write: ...

    def read_state(self, file: Path) -> Any: ...


class MasterUpdates:
    """AdamW on the masters, which are whole or in parts."""

    begins_again = True

    def __init__(
        self,
        model: Any,
        parts: StateParts,
        optim: OptimConfig,
        total_updates: int,
        scale: LossScale | None = None,
        kind: Optimizer = "adamw",
    ):
        """`total_updates` is the number of optimiser steps that the learning-rate schedule spans. `scale`: of the loss,
        for a model that computes in float16."""
        self._scale = scale
        self._kind: Optimizer = kind
        self._parts, self._optim, self._total_updates = parts, optim, total_updates
        self._trained = [p for p in model.parameters() if p.requires_grad]
        self.masters = parts.masters(model)
        names = [name for name, p in model.named_parameters() if p.requires_grad]
        self._numbered = [p for group in parameter_groups(names, self._trained, optim) for p in group["params"]]
        self.optimizer: Any = make_optimizer(kind, parameter_groups(names, self.masters.stepped(), optim), optim)
        self.schedule = make_schedule(self.optimizer, optim, total_updates)

    def backward(self, loss: torch.Tensor) -> None:
        (loss if self._scale is None else loss * self._scale.value).backward()

    def step(self, check: Callable[[float], None]) -> dict[str, float]:
        scale, lr = self._scale, float(self.schedule.get_last_lr()[0])
        factor = scale.value if scale else 1.0
        self.masters.take_gradients()
        grad_norm = float(self._parts.norm(self.masters.norm())) / factor
        if scale is not None and not math.isfinite(grad_norm):
            self.optimizer.zero_grad(set_to_none=True)
            return {"lr": lr, **scale.overflowed(grad_norm)}
        check(grad_norm)
        self._divide_gradients(factor * max(1.0, (grad_norm + 1e-6) / self._optim.max_grad_norm))
        self.optimizer.step()
        self.masters.round_into_parameters()
        self.schedule.step()
        self.optimizer.zero_grad(set_to_none=True)
        return {"grad_norm": grad_norm, "lr": lr, **(scale.went_well() if scale else {})}

    def _divide_gradients(self, divisor: float) -> None:
        """Take what the step is given off the loss's scale, and clip it: a fused AdamW does that as it reads them."""
        gradients = [master.grad for master in self.masters.stepped() if master.grad is not None]
        if self._kind == "adamw":  # as torch.amp.GradScaler tells it
            divides = divisor != 1.0 and gradients
            self.optimizer.grad_scale = torch.tensor(divisor, device=gradients[0].device) if divides else None
            return
        for gradient in gradients if divisor != 1.0 else ():
            gradient.div_(divisor)

    def drop_gradients(self) -> None:
        self.masters.drop_gradients()
        for parameter in self._trained:
            parameter.grad = None

    def forget_moments(self) -> None:
        self.optimizer.state.clear()

    def stepped(self) -> Iterator[torch.Tensor]:
        yield from self.masters.stepped()

    def copies(self) -> Iterator[torch.Tensor]:
        yield from self.masters.copies()
        for state in self.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))

    def files(self, name: str, *, copies: bool) -> Write:
        state = {
            "masters": self.masters.state_dict(),
            "optimizer": self._each_moment(self.optimizer.state_dict(), self._parts.divided),
            "schedule": schedule_state(self.schedule),
            **({"loss_scale": self._scale.state_dict()} if self._scale else {}),
        }
        return self._parts.state_files(state, name, copies=copies)

    def load(self, file: Path) -> None:
        state, folder = self._parts.read_state(file), file.parent
        self.masters.load_state_dict(state.get("masters", {}), folder)
        # torch would restore the saved settings with the moments, and a resume may have changed them.
        ours = self.optimizer.state_dict()["param_groups"]
        check_same_groups(state["optimizer"]["param_groups"], ours, folder)
        check_same_moments(state["optimizer"], self._kind, folder)
        theirs = self._each_moment(state["optimizer"], self._parts.part)
        self.optimizer.load_state_dict({**theirs, "param_groups": ours})
        self.schedule = make_schedule(self.optimizer, self._optim, self._total_updates, made=state["schedule"])
        if self._scale is not None and "loss_scale" in state:
            self._scale.load_state_dict(state["loss_scale"])

    def _each_moment(self, state: dict[str, Any], change: Callable[[Any, torch.Tensor], Any]) -> dict[str, Any]:
        """An optimiser's state with each moment changed, given its parameter, too; counts of steps are scalars."""
        changed = {
            number: {
                name: change(value, self._numbered[number]) if getattr(value, "shape", ()) else value
                for name, value in values.items()
            }
            for number, values in state["state"].items()
        }
        return {**state, "state": changed}


def make_schedule(
    optimizer: torch.optim.Optimizer, optim: OptimConfig, total_updates: int, *, made: dict[str, Any] | None = None
) -> torch.optim.lr_scheduler.LambdaLR:
    """The learning rate's course over so many updates; `made` is the saved state of one that has made some of them."""
    last = made["last_epoch"] - 1 if made else -1
    return torch.optim.lr_scheduler.LambdaLR(optimizer, partial(lr_factor, optim, total_updates), last_epoch=last)


def schedule_state(schedule: torch.optim.lr_scheduler.LambdaLR) -> dict[str, Any]:
    return {k: v for k, v in schedule.state_dict().items() if k != "lr_lambdas"}


def lr_factor(optim: OptimConfig, total_updates: int, update: int) -> float:
    """Factor of the peak learning rate at the `update`-th optimiser step, from 0."""
    if update < optim.lr_warmup_steps:
        return (update + 1) / optim.lr_warmup_steps
    if optim.lr_scheduler_type == "constant":
        return 1.0
    span = max(total_updates - optim.lr_warmup_steps, 1)
    done = min((update - optim.lr_warmup_steps) / span, 1.0)
    shape = 1 - done if optim.lr_scheduler_type == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return optim.min_lr_ratio + (1 - optim.min_lr_ratio) * shape
