"""Routers of a model of experts, found by what they do: each takes the largest of its scores by one `topk`.

A forward pass of a router is watched at that call, whatever the family computes before and after it (softmax over all
or over the chosen, groups, biases, scaling): `topk` over `experts` of a [T, experts] tensor.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from asyncrl.errors import UserError
from asyncrl_plugins.moe.shape import ExpertShape

LAYER = re.compile(r"\blayers\.(\d+)\.")
Choose = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Given scores [T, experts] and the numbers [T, chosen] of the largest, returns the numbers to take."""


class WatchedChoice(TorchFunctionMode):
    """Block in which the `topk` of a router asks what to take."""

    def __init__(self, shape: ExpertShape, choose: Choose):
        super().__init__()
        self.__shape, self.__choose = shape, choose
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk):
            return result
        scores, numbers = args[0], result[1]
        if scores.ndim != 2 or (scores.shape[1], numbers.shape[1]) != (self.__shape.experts, self.__shape.chosen):
            return result  # such as that of groups of experts
        self.calls += 1
        taken = self.__choose(scores, numbers)
        if taken is numbers:
            return result
        return torch.return_types.topk((scores.gather(1, taken), taken))


def routers(model: Any, shape: ExpertShape) -> dict[int, Any]:
    """Router of each layer that has one. Raises UserError where they cannot be found."""
    found: dict[int, Any] = {}
    for name, module in model.named_modules():
        layer = LAYER.search(name + ".")
        if layer and re.search(r"(router|gate)$", type(module).__name__, re.IGNORECASE):
            weight = getattr(module, "weight", None)
            if weight is not None and tuple(weight.shape) == (shape.experts, weight.shape[-1]):
                found[int(layer[1])] = module
    if not found or max(found) >= shape.layers:
        raise UserError(
            f"no router of {shape.experts} experts is among the modules of {type(model).__name__}: it computes them in "
            "another way than transformers' TopKRouter. Leave algorithm.routing_replay and algorithm.router_losses out"
        )
    return dict(sorted(found.items()))


def watch(router: Any, shape: ExpertShape, choose: Choose) -> None:
    """Ask `choose` in each forward pass of a router from now on."""
    forward = router.forward

    def watched(*args: Any, **kwargs: Any) -> Any:
        with WatchedChoice(shape, choose) as choice:
            output = forward(*args, **kwargs)
        if choice.calls != 1:
            raise UserError(
                f"{type(router).__name__} does not choose its {shape.chosen} of {shape.experts} experts by one topk "
                f"({choice.calls} were seen). Leave algorithm.routing_replay out for models of this family"
            )
        return output

    router.forward = watched
