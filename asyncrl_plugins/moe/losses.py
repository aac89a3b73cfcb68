"""Losses of the routers over all tokens of an update, and the load of the experts.

Load balancing is that of transformers (`load_balancing_loss_func`; Switch Transformer, arXiv 2101.03961, equations 4 to
6): `E sum_e f_e P_e`, over all layers together. Sums are divided by the tokens of the whole update. The shares `f_e`
have no gradient, and are those of all micro-batches of the update so far, on all ranks (arXiv 2501.11873): with one
micro-batch the loss is exact, and with several the first ones know fewer tokens.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from asyncrl.errors import UserError
from asyncrl_plugins.moe.routers import routers
from asyncrl_plugins.moe.settings import RouterLossesConfig
from asyncrl_plugins.moe.shape import ExpertShape
from learner.training.loss_hook import AdditionalLoss

if TYPE_CHECKING:
    from learner.training.batch import Batch
    from learner.training.engine import TorchEngine
    from learner.training.loss_hook import PolicyPass
    from learner.training.packing import MicroBatch


@dataclass(frozen=True)
class Routed:
    """Routing of `T` tokens in all layers with experts."""

    logits: list[torch.Tensor]
    """[T, experts] of each layer, with gradient."""
    numbers: list[torch.Tensor]
    """[T, chosen] of each layer: the experts that computed the tokens."""

    def counts(self) -> torch.Tensor:
        """[layers, experts] fp32 tokens of each expert."""
        experts = self.logits[0].shape[-1]
        return torch.stack([torch.bincount(n.flatten(), minlength=experts).float() for n in self.numbers])

    def balance_loss(self, shares: torch.Tensor, tokens: int) -> torch.Tensor:
        """Part of these tokens in the loss of an update of `tokens`. `shares` [experts]: tokens of an expert by all."""
        summed = torch.stack([logits.float().softmax(-1).sum(0) for logits in self.logits]).sum(0)
        return shares.numel() * (shares * summed).sum() / (tokens * len(self.logits))

    def z_loss(self, tokens: int) -> torch.Tensor:
        """Part of these tokens in the mean of logsumexp² over `tokens` and layers."""
        squares = torch.stack([logits.float().logsumexp(-1).square().sum() for logits in self.logits])
        return squares.sum() / (tokens * len(self.logits))

    def other_experts(self) -> torch.Tensor:
        """Share of tokens and layers in which the router's own choice is another."""
        pairs = zip(self.logits, self.numbers, strict=True)
        same = [logits.topk(n.shape[1]).indices.sort(-1).values == n.sort(-1).values for logits, n in pairs]
        return 1 - torch.stack([found.all(-1).float().mean() for found in same]).mean()


class RouterLosses:
    """Hook of the loss: load balancing and z-loss of the routers."""

    trains_entropy = False

    def __init__(self, settings: RouterLossesConfig):
        self._settings = settings
        self._watched: Any = None
        self._logits: dict[int, torch.Tensor] | None = None
        """[T, experts] of each layer, of the pass that is watched; None: none is."""
        self._numbers: dict[int, torch.Tensor] = {}
        self._counts: torch.Tensor | None = None
        """[layers, experts] of the update so far, on all ranks."""
        self._shape = ExpertShape(0, 0, 0)

    def before_pass(self, actor: TorchEngine, batch: Batch, micro_batch: MicroBatch) -> None:
        if self._watched is not actor.model:
            self._watch(actor.model)
            self._watched = actor.model
        self._logits = {}

    def _watch(self, model: Any) -> None:
        shape = ExpertShape.of(model.config.get_text_config().to_dict())
        module = sys.modules[getattr(model, "base_class", type(model)).__module__]
        if shape is None or not any(
            hasattr(sys.modules.get(cls.__module__), "load_balancing_loss_func") for cls in type(model).__mro__
        ):
            raise UserError(
                f"algorithm.router_losses is chosen, and {module.__name__} of transformers has no load-balancing loss: "
                "its routers are balanced in another way. Leave algorithm.router_losses out"
            )
        self._shape = shape
        for layer, router in routers(model, shape).items():
            router.register_forward_hook(lambda _module, _inputs, output, layer=layer: self._take(layer, output))

    def _take(self, layer: int, output: tuple[torch.Tensor, ...]) -> None:
        if self._logits is None:  # a pass that is not ours, or what the backward pass computes again
            return
        self._logits[layer] = next(t for t in output if t.is_floating_point() and t.shape[-1] == self._shape.experts)
        self._numbers[layer] = next(t for t in output if not t.is_floating_point())

    def __call__(self, seen: PolicyPass) -> AdditionalLoss:
        assert self._logits is not None, "before_pass comes first"
        layers = sorted(self._logits)
        routed = Routed([self._logits[layer] for layer in layers], [self._numbers[layer] for layer in layers])
        self._logits, self._numbers = None, {}
        counts = routed.counts().cpu()
        if seen.micro_batch.is_idle:
            counts = torch.zeros_like(counts)
        counts = seen.actor.ranks.sum_columns({"counts": counts.flatten()})["counts"].view_as(counts)
        if seen.number > 1 and self._counts is not None:
            counts = counts + self._counts
        self._counts = counts
        device, tokens = seen.outputs.logprobs.device, len(routed.numbers[0])
        shares = counts.sum(0) * self._shape.chosen / counts.sum().clamp(min=1)
        shares = shares.to(device)
        balance = routed.balance_loss(shares, seen.update_tokens)
        z = routed.z_loss(seen.update_tokens)
        of_update = self._settings.balance_coef * balance + self._settings.z_coef * z
        nothing = torch.zeros_like(seen.outputs.logprobs.detach())
        whole = seen.update_tokens / tokens
        numbers = {
            "router/balance_loss": balance.detach() * whole,
            "router/z_loss": z.detach() * whole,
            "router/load_max": (counts / counts.mean(-1, keepdim=True).clamp(min=1e-9)).max(),
            "router/other_experts": routed.other_experts(),
        }
        columns = {name: nothing + float(number) for name, number in numbers.items()}
        return AdditionalLoss(nothing, columns, of_update)
