"""Updates by DeepSpeed's ZeRO optimisers: torch's AdamW on this rank's part of the fp32 masters.

DeepSpeed flattens each parameter group into one tensor and steps that. Parts of a model that a batch may not reach (a
vision tower in a batch of text) are groups of their own, so that they can be left out, as AdamW leaves out a parameter
without a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from asyncrl.config.service_sections import OptimConfig
from asyncrl.errors import BadStateError
from asyncrl.models.parts import part_of
from asyncrl_plugins.deepspeed.engine import ZeroEngine, ZeroSettings
from learner.ranks.group import Ranks
from learner.training.master_weights import check_masters
from learner.training.optimizers import check_same_groups, check_same_moments, parameter_groups
from learner.training.sharded_files import ShardedFiles, Write
from learner.training.sharded_state import TensorPart
from learner.training.updates import make_schedule, schedule_state

MOMENTS = ("exp_avg", "exp_avg_sq")


class ZeroUpdates:
    """The trained parameters of a model in the hands of ZeRO."""

    begins_again = False

    def __init__(
        self,
        model: torch.nn.Module,
        settings: ZeroSettings,
        optim: OptimConfig,
        total_updates: int,
        ranks: Ranks,
        files: ShardedFiles,
    ):
        """`files` are the model's, which knows it as it was loaded."""
        self._optim, self._total_updates, self._ranks = optim, total_updates, ranks
        self._settings, self._files = settings, files
        self._trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._dtypes = {name: files.dtypes[name] for name in self._trained}
        groups, self._in_file = _groups(self._trained, optim)
        self._optimizer = torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, fused=True)
        self._reached: set[int] = set()
        self._left_out: list[tuple[dict[str, Any], list[torch.Tensor]]] = []
        for group in groups:
            for parameter in group["params"]:
                parameter.register_post_accumulate_grad_hook(lambda _, n=group["number"]: self._reached.add(n))
        self._widened = _widened(model)
        for parameter in self._widened if settings.stage > 1 else ():  # stage 1 sums in fp32 itself
            parameter.register_post_accumulate_grad_hook(_round_gradient)
        self._group_of = {id(p): group["number"] for group in groups for p in group["params"]}
        self.engine = ZeroEngine(model, settings, self._optimizer, optim.max_grad_norm)
        self._zero: Any = self.engine.deepspeed.optimizer
        self._is_parted = settings.stage == 3
        self._flat = self._flat_masters()
        self._begin_moments()
        self.schedule = make_schedule(self._optimizer, optim, total_updates)
        self._check: Callable[[float], None] = lambda _: None
        self._optimizer.register_step_pre_hook(self._before_group)
        self._optimizer.register_step_post_hook(self._after_group)

    def run(self, compute: Callable[[], Any]) -> Any:
        """Compute with gradients, of which autograd adds up the output layer's in fp32."""
        for parameter in self._widened:
            parameter.grad_dtype = torch.float32
        return self.engine.run(compute)

    def backward(self, loss: torch.Tensor) -> None:
        # Ranks are averaged there.
        self.engine.deepspeed.backward(loss * self._ranks.size, scale_wrt_gas=False)

    def step(self, check: Callable[[float], None]) -> dict[str, float]:
        lr = float(self.schedule.get_last_lr()[0])
        self._check = check
        self.engine.deepspeed.step()
        grad_norm = float(self.engine.deepspeed.get_global_grad_norm())
        if not self.engine.deepspeed.was_step_applied():  # it looks at fp32 gradients itself
            check(grad_norm)
            raise BadStateError(f"DeepSpeed has made no step, and the gradient norm is {grad_norm}")
        self.schedule.step()
        self._reached.clear()
        self._clear_buffers()
        return {"grad_norm": grad_norm, "lr": lr}

    def _before_group(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Look at the norm before the first group is stepped, and leave out groups that no gradient has reached."""
        self._check(float(self._zero._global_grad_norm))
        self._left_out = [(g, g["params"]) for g in optimizer.param_groups if g["number"] not in self._reached]
        for group, _params in self._left_out:
            group["params"] = []

    def _after_group(self, *_: Any) -> None:
        for group, params in self._left_out:
            group["params"] = params

    @torch.no_grad()
    def _clear_buffers(self) -> None:
        """Set to zero what DeepSpeed keeps gradients in between steps: where a parameter is not reached by a step's
        first micro-batch, it would add later ones to what is there."""
        buffers = [p.grad for flats in self._flat.values() for p in flats if p.grad is not None]
        if self._is_parted:
            buffers.append(self._zero.grad_partitions_flat_buffer)
        buffers += getattr(self._zero, "accumulated_grads_in_cpu", {}).values()
        for buffer in buffers:
            buffer.zero_()

    def drop_gradients(self) -> None:
        """Nothing to do: where gradients are to be dropped, the run ends (`begins_again`)."""

    def _flat_masters(self) -> dict[int, list[torch.Tensor]]:
        """Masters of this rank, flattened, by the number of their group."""
        if not self._is_parted:
            return {group["number"]: list(group["params"]) for group in self._optimizer.param_groups}
        found: dict[int, list[torch.Tensor]] = {group["number"]: [] for group in self._optimizer.param_groups}
        for place, flat in enumerate(self._zero.fp32_partitioned_groups_flat):
            number = self._optimizer.param_groups[self._zero.sub_group_to_group_id[place]]["number"]
            found[number].append(flat)
        return found

    def _begin_moments(self) -> None:
        """Make AdamW's state now, where it would be made in the first step: a checkpoint is read into it, and DeepSpeed
        links parameters of stages 1 and 2 to it when the first of the groups is stepped."""
        from deepspeed.utils.mixed_precision_linkage import lazy_init_hp_params_optimizer_state

        for flats in self._flat.values():
            for flat in flats:
                step_on = flat.device if self._optimizer.defaults["fused"] else torch.device("cpu")
                self._optimizer.state[flat] = {
                    "step": torch.zeros((), dtype=torch.float32, device=step_on),
                    **{name: torch.zeros_like(flat, requires_grad=False) for name in MOMENTS},
                }
        if not self._is_parted:
            for parameters, flat in zip(self._zero.bit16_groups, self._flat.values(), strict=True):
                lazy_init_hp_params_optimizer_state(parameters, flat[0], self._optimizer.state)

    @torch.no_grad()
    def forget_moments(self) -> None:
        for state in self._optimizer.state.values():
            for value in state.values():
                value.zero_()

    def stepped(self) -> Iterator[torch.Tensor]:
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_local_fp32_param

        for parameter in self._trained.values():
            read = safe_get_local_fp32_param if self._is_parted else safe_get_full_fp32_param
            yield cast(torch.Tensor, read(parameter))

    def copies(self) -> Iterator[torch.Tensor]:
        for flats in self._flat.values():
            yield from flats
        for state in self._optimizer.state.values():
            yield from state.values()

    def part(self, parameter: Any, moment: str | None = None) -> TensorPart:
        """Part on this rank of the fp32 master of a trained parameter, or of one of its moments: a view."""
        if self._is_parted:
            read = self._zero._get_fp32_opt_state_partition
            flat, _ = read(parameter, release_swap_buffers=True, optim_state_key=moment)
            return even_part(flat.detach(), self._ranks.rank, parameter.ds_shape)
        fragment = parameter._hp_mapping
        if fragment is None:  # other ranks have all of it
            return TensorPart(torch.empty(0), 0, parameter.shape)
        return TensorPart(
            fragment.get_hp_fragment(moment).detach(), fragment.lp_fragment_address.start, parameter.shape
        )

    def files(self, name: str, *, copies: bool) -> Write:
        return self._files.state_files(self._state(), name, copies=copies)

    def _state(self) -> dict[str, Any]:
        """State in the form of torch's optimiser, numbered by the places of parameters in the groups of
        `parameter_groups`."""
        masters = {n: self.part(p) for n, p in self._rounded().items()}
        state: dict[int, dict[str, Any]] = {}
        for number, name in enumerate(self._in_file.names):
            parameter = self._trained[name]
            step = self._steps(parameter)[0]
            if step:
                moments = {m: self.part(parameter, m) for m in MOMENTS}
                state[number] = {"step": step.cpu().clone(), **moments}
        optimizer = {"state": state, "param_groups": self._in_file.param_groups}
        return {"masters": masters, "optimizer": optimizer, "schedule": schedule_state(self.schedule)}

    def load(self, file: Path) -> None:
        state, folder = self._files.read_state(file), file.parent
        masters, optimizer = state.get("masters", {}), state["optimizer"]
        check_masters(masters.keys(), self._rounded().keys(), self._dtypes, folder)
        check_same_groups(optimizer["param_groups"], self._in_file.param_groups, folder)
        check_same_moments(optimizer, "adamw", folder)
        self._fill(masters, optimizer["state"])
        self.schedule = make_schedule(self._optimizer, self._optim, self._total_updates, made=state["schedule"])

    def _fill(self, masters: Mapping[str, Any], moments: Mapping[int, Any]) -> None:
        for name, master in masters.items():
            self.part(self._trained[name]).fill(master)
        self.forget_moments()
        for number, saved in moments.items():
            parameter = self._trained[self._in_file.names[number]]
            for moment in MOMENTS:
                self.part(parameter, moment).fill(saved[moment])
            for step in self._steps(parameter):
                step.fill_(max(float(step), float(saved["step"])))  # one of each group, whose parameters step together

    def _rounded(self) -> dict[str, torch.Tensor]:
        """Trained parameters that were loaded as 16 bits."""
        return {name: p for name, p in self._trained.items() if self._dtypes[name] != torch.float32}

    def _steps(self, parameter: torch.Tensor) -> list[torch.Tensor]:
        """Counts of the steps of a parameter's group."""
        return [self._optimizer.state[flat]["step"] for flat in self._flat[self._group_of[id(parameter)]]]


def _widened(model: Any) -> list[torch.nn.Parameter]:
    """Trained 16-bit weights of the output layer, which has a gradient from each chunk of a micro-batch's tokens: their
    sum in 16 bits is off by 0.5 % of its norm where a single rounding is by 0.2 %."""
    layer = model.get_output_embeddings()
    return [p for p in layer.parameters() if p.requires_grad and p.dtype != torch.float32]


def _round_gradient(parameter: torch.Tensor) -> None:
    """Round a micro-batch's gradient, once: DeepSpeed's buckets at stages 2 and 3 have the weights' dtype. Sums over
    micro-batches and ranks are in fp32 behind them."""
    gradient, parameter.grad = parameter.grad, None
    assert gradient is not None
    parameter.grad_dtype = parameter.dtype
    parameter.grad = gradient.to(parameter.dtype)


@dataclass(frozen=True)
class _InFile:
    """The optimiser of a whole model, as a checkpoint has it."""

    names: list[str]
    """Names of the parameters, by their numbers."""
    param_groups: list[dict[str, Any]]


def even_part(elements: torch.Tensor, rank: int, shape: torch.Size) -> TensorPart:
    """The part of a tensor that is divided into ranges of one length, `elements`'; those behind the tensor's last are
    padding."""
    first = min(rank * elements.numel(), shape.numel())
    return TensorPart(elements[: shape.numel() - first], first, shape)


def shape_of(parameter: torch.Tensor) -> torch.Size:
    """The shape of the whole, also where stage 3 has taken it apart."""
    return getattr(parameter, "ds_shape", parameter.shape)


def _groups(trained: dict[str, torch.nn.Parameter], optim: OptimConfig) -> tuple[list[dict[str, Any]], _InFile]:
    """The groups of `parameter_groups`, each divided by the parts of a model, with numbers; and as a file has them."""
    outlines = {name: torch.empty(shape_of(p), device="meta") for name, p in trained.items()}
    names = {id(outline): name for name, outline in outlines.items()}
    whole = torch.optim.AdamW(parameter_groups(list(outlines), list(outlines.values()), optim), betas=optim.betas)
    groups: list[dict[str, Any]] = []
    for group in whole.param_groups:
        parts: dict[str, list[torch.nn.Parameter]] = {}
        for outline in group["params"]:
            name = names[id(outline)]
            parts.setdefault(part_of(name.split(".")), []).append(trained[name])
        common = {key: group[key] for key in ("lr", "weight_decay")}
        groups += [{**common, "params": params, "number": len(groups) + i} for i, params in enumerate(parts.values())]
    in_order = [names[id(outline)] for group in whole.param_groups for outline in group["params"]]
    return groups, _InFile(in_order, whole.state_dict()["param_groups"])
