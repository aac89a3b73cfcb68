"""The training engine: a model, its optimiser and its schedule, whole on one device or in parts on all ranks."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch

from asyncrl.attention.shared_prefix import SHARED_PREFIX_ATTENTION
from asyncrl.config.part_settings import ModelSettings
from asyncrl.config.parts import BASE_WEIGHTS
from asyncrl.config.sampling_rules import UNTRUNCATED
from asyncrl.config.service_sections import OptimConfig
from asyncrl.devices.device import gpu_bytes, resolve_device
from asyncrl.devices.sleeping import Sleeper, check_wake_parity, fixed_tokens
from asyncrl.errors import BadStateError, UserError
from asyncrl.model_files.folder import base_fingerprint
from asyncrl.models.compiled_layers import compile_layers
from asyncrl.models.export import write_whole
from asyncrl.models.loading import load_model
from asyncrl.models.lora import add_adapter, describe_adapter, resolve_adapter, write_adapter_folder
from asyncrl.models.output_head import Asked, OutputHead, TokenOutputs, hidden_states
from asyncrl.models.parts import checkpoint_layers, freeze_parts
from asyncrl.models.small_copy import family_of
from asyncrl.models.token_trace import Replay, TokenTrace, token_traces
from asyncrl.plugins import implementation
from asyncrl.processing.encoded_prompt import EncodedPrompt
from asyncrl.processing.processor import PLACEHOLDER_ID_NAMES, special_token_ids
from learner.ranks.group import ALONE, Ranks
from learner.training.engine_facts import EngineFacts, facts_of
from learner.training.master_weights import LossScale
from learner.training.packing import MicroBatch, PackedTrajectory, TrainGroup, build_micro_batch, unpacked
from learner.training.packing_check import check_outputs, packing_obstacle, stateful_obstacle
from learner.training.sharded_files import Write
from learner.training.sharding import make_sharding
from learner.training.vision_features import VisionFeatures

logger = logging.getLogger(__name__)

OWNER = "the training engine"
ENGINE_FILE = "engine.pt"
"""Optimiser state in a checkpoint."""


class TorchEngine:
    """A model, AdamW on its fp32 master weights, a learning-rate schedule, and an optional adapter.

    Asleep, everything that needs weights or optimiser state raises BadStateError. Of several ranks each has such an
    engine, and calls the methods that compute, gather or write at the same place of its program.
    """

    role = "actor"
    """Name among the engines of a step."""
    reduces_once = False
    """Whether an update's gradients are summed on each rank first, and over ranks with its last micro-batch alone."""

    def __init__(self, settings: ModelSettings, optim: OptimConfig, total_updates: int, ranks: Ranks = ALONE):
        """`total_updates` is the number of optimiser steps that the learning-rate schedule spans."""
        self.settings = settings
        self._optim = optim
        self._total_updates = total_updates
        self.ranks = ranks
        self.adapter = resolve_adapter(settings.model)
        """The adapter that is trained and published; None: the model itself."""
        self.device = ranks.own(resolve_device(settings.learner.device, "learner.device"))
        self.sharding = make_sharding(settings.learner, self.device, ranks)
        self._sleeper = Sleeper(OWNER, self.device, settings.run_path, has_views=settings.learner.is_divided)
        self.companions: tuple[TorchEngine, ...] = ()
        """Engines that sleep and wake with this one."""
        self.traces: dict[str, TokenTrace] = {}
        """Traces that packed groups must have, of the actor."""
        self._replays: dict[str, Replay] = {}
        self.features: VisionFeatures | None = None
        """Cache of image features; None: they are computed in each pass."""
        self.obstacle = ""
        """Reason for which this model's groups cannot be packed: each row is then computed alone (packing_check.py)."""

    def prepare(self) -> None:
        """Load the model and build the optimiser. Raises UserError where its family cannot be trained."""
        self._check_packing()
        base = BASE_WEIGHTS.find(self.settings.model.quantization)
        model: Any = load_model(
            self.settings.model,
            device=torch.device("cpu") if base else self.sharding.load_device,
            text_attention=SHARED_PREFIX_ATTENTION if self.packs else family_of(self.settings.model).attention,
            stays_mapped=self.sharding.gathers or (base is not None and self.device.type != "cpu"),  # it leaves below
        )
        if base:
            implementation(base.held_by_learner)(model, self.device)
        check_outputs(model, self.settings.model)
        self._adapted: Any = None
        if self.adapter is not None:
            self._adapted = add_adapter(model, self.adapter, seed=self.settings.seed)
            logger.info("the adapter of the %s is on layers %s", self.role, describe_adapter(model))
        else:
            freeze_parts(model, self.settings.model)
        if self.settings.learner.gradient_checkpointing:
            checkpoint_layers(model, self.settings.learner.gradient_checkpointing)
        if self.settings.learner.compile_layers:
            compile_layers(model)
        self.model: Any = model.train()
        if self.role == "actor":  # other roles are other models, or the policy that it was at first
            self.traces = token_traces(self.settings.algorithm, self.settings.model)
            self._replays = {name: trace.replay(self.model) for name, trace in self.traces.items()}
        self._make_head()
        self.facts: EngineFacts = facts_of(self.model, self.adapter)
        self.sharding.shard(self.model)
        self._make_updates()

    @property
    def packs(self) -> bool:
        return not self.obstacle

    def _check_packing(self) -> None:
        self.obstacle = packing_obstacle(self.settings.model)
        if self.sharding.gathers_each_call and not self.obstacle:
            self.obstacle = stateful_obstacle(self.settings.model)
        if self.obstacle:
            said = "each row of the %s is computed alone, which takes longer than packed groups: packed, %s"
            logger.warning(said, self.role, self.obstacle)

    def _make_head(self) -> None:
        """Make what turns hidden states into this engine's outputs."""
        banned = sorted(special_token_ids(self.model.config, PLACEHOLDER_ID_NAMES))
        rollout = self.settings.rollout
        self.head = OutputHead(
            self.model,
            temperature=rollout.temperature,
            banned=torch.tensor(banned, dtype=torch.long, device=self.device),
            truncation={name: getattr(rollout, name) for name in UNTRUNCATED} if rollout.truncates else None,
            gpu_bytes=gpu_bytes(str(self.device), self.settings.budget_gib),
        )
        self._fixed_tokens = fixed_tokens(self.model.get_output_embeddings().weight.shape[0], banned)

    def _make_updates(self) -> None:
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        scale = LossScale() if self.facts.dtype == torch.float16 else None
        self.updates = self.sharding.updates(self._optim, self._total_updates, scale)

    def forward(self, micro_batch: MicroBatch, **asked: Unpack[Asked]) -> TokenOutputs:
        """Log-probs of the policy, and what else is asked for of its distributions (`OutputHead`)."""
        self._sleeper.check_awake()
        outputs = self.sharding.run(lambda: vars(self.head(self._states(micro_batch), micro_batch.targets, **asked)))
        return TokenOutputs(**outputs)

    def states(self, micro_batch: MicroBatch) -> torch.Tensor:
        """[n, D] that the trained tokens are predicted from."""
        self._sleeper.check_awake()
        return self.sharding.run(lambda: self._states(micro_batch))

    def _states(self, micro_batch: MicroBatch) -> torch.Tensor:
        with ExitStack() as taking:
            taking.enter_context(_exact(self.device))  # compiled layers want both passes alike
            for name in self._replays.keys() & micro_batch.traces.keys():
                taking.enter_context(self._replays[name](micro_batch.traces[name]))
            return hidden_states(self.model, self._inputs(micro_batch))[micro_batch.predict_from]

    def _inputs(self, micro_batch: MicroBatch) -> dict[str, Any]:
        """Arguments of the model, with features in the place of pixels where features are kept."""
        inputs = micro_batch.inputs if self.packs else unpacked(micro_batch)
        if self.features is None:
            return inputs
        return self.features.inputs(self.model, self.facts.frozen_vision, inputs)

    def tokens_at_once(self, tokens_per_microbatch: int) -> int:
        """The budget of a micro-batch, or one that leaves each row alone where this model needs that."""
        return tokens_per_microbatch if self.packs else 1

    def pack(self, groups: Sequence[TrainGroup]) -> MicroBatch:
        """One micro-batch of these groups, on the device. Raises BadStateError where they lack a trace."""
        self._sleeper.check_awake()
        for name in self.traces:
            if not all(name in group.traces for group in groups):
                raise BadStateError(
                    f"algorithm.{name} is chosen, and groups from before that are without it. Leave it out until they "
                    "are trained, or begin a new run"
                )
        # Pixels whose features are kept never get to the device.
        media_on = torch.device("cpu") if self.features else self.device
        return build_micro_batch(self.model, groups, self.device, self.facts.dtype, media_on=media_on)

    def backward(self, loss: torch.Tensor, *, is_last: bool = True) -> None:
        """Accumulate the gradient of a loss that is already divided by global counts; `is_last`: of its update.

        A micro-batch of text has none where the language model is frozen: nothing that is trained has computed it.
        """
        if not loss.requires_grad:
            assert not self.reduces_once, "gradients that wait would never be reduced"
            return
        if self.reduces_once:
            self.sharding.reduce_gradients(is_last)
        with _exact(self.device):
            self.updates.backward(loss)

    def optimizer_step(self) -> dict[str, float]:
        """Clip, update, advance the schedule, clear gradients. Returns `grad_norm` (before clipping) and `lr`.

        Raises BadStateError, on all ranks, when the gradient is not finite; the weights are then untouched.
        """
        self._sleeper.check_awake()
        return self.updates.step(self._check_norm)

    def _check_norm(self, grad_norm: float) -> None:
        if not math.isfinite(grad_norm):
            raise BadStateError(
                f"the gradient norm is {grad_norm}. The weights are those before this update. Look at the last samples "
                "and at logprob_diff_max in metrics.jsonl, or start a new run from the last checkpoint's model with a "
                f"learning rate below {self._optim.lr} (learner.optim.lr)"
            )

    def drop_gradients(self) -> None:
        """Forget what this update has accumulated so far."""
        self.updates.drop_gradients()

    def forget_moments(self) -> None:
        """Begin AdamW's moments anew, and its count of the steps that they are means of; the learning rate goes on."""
        self.updates.forget_moments()

    def unwrap_model(self) -> Any:
        """The Hugging Face model itself."""
        self._sleeper.check_awake()
        return self.model

    def published_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole tensors that the rollout servers need, tied weights once; all ranks take them all, one at a time."""
        self._sleeper.check_awake()
        return self._published()

    def _published(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.ranks.announce("published_state", role=self.role)
        yield from self.sharding.published()

    def load_published(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy published tensors into the model. Raises ValueError where names or shapes differ."""
        self._sleeper.check_awake()
        self.sharding.load_published(tensors)

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Inside, `forward` is that of the initial policy, without gradient: the adapter is switched off."""
        if self._adapted is None:
            raise UserError(
                "the reference policy is the adapter switched off, and model.lora.rank is 0. Set model.lora.rank=16"
            )
        replays, self._replays = self._replays, {}  # they are the adapted policy's
        try:
            with torch.no_grad(), self._adapted.disable_adapter():
                yield
        finally:
            self._replays = replays

    def export(self, processor: Any, folder: Path) -> None:
        """Write the policy: an ordinary Hugging Face folder, or its adapter as a PEFT folder with the processor's
        files."""
        if self.adapter is None:
            self.save_model(processor, folder)
            return
        spec, model = self.adapter, self.settings.model
        tensors = [(name, tensor.cpu()) for name, tensor in self.published_state()]

        def write(building: Path) -> None:
            write_adapter_folder(building, spec, tensors, base=base_fingerprint(model), base_path=model.path)
            processor.save_pretrained(building)

        if self.ranks.leads:
            write_whole(folder, write)

    def save_model(self, processor: Any, folder: Path) -> None:
        """Write the model as a Hugging Face folder."""
        self.ranks.announce("save_model", role=self.role, folder=str(folder.absolute()))
        self.model_files(processor, copies=False)(folder)

    def model_files(self, processor: Any, *, copies: bool) -> Write:
        """The model as it is now, as a Hugging Face folder."""
        self._sleeper.check_awake()
        return self.sharding.model_files(processor, copies=copies)

    def files(self, *, copies: bool) -> Write:
        """Master weights, optimiser and schedule as they are now; the model, or its adapter, is written beside them.

        Any number of ranks reads them, and a process without ranks.
        """
        self._sleeper.check_awake()
        self.sharding.changed()
        return self.updates.files(ENGINE_FILE, copies=copies)

    def load(self, folder: Path) -> None:
        """Restore masters, moments and the number of updates; learning rate, decay and betas are those of our settings.

        Raises UserError where the checkpoint's weights had another dtype, or other parts a learning rate of their own.
        """
        self.sharding.changed()
        self.updates.load(folder / ENGINE_FILE)

    def sleep(self) -> int:
        """Take parameters, gradients, masters and optimiser state off the device, on all ranks. Returns the bytes that
        left this one's."""
        self._sleeper.check_awake()
        self.ranks.announce("sleep")
        moved = sum(engine.fall_asleep() for engine in (self, *self.companions))
        self.ranks.agree(None)  # all devices are free
        return moved

    def wake(self) -> int:
        """Bring them back, bit for bit. Returns the bytes: 0 where it is awake already.

        Raises BadStateError where there is no room for them, or where the model is not what it was.
        """
        if not self._sleeper.is_asleep:
            return 0
        self.ranks.announce("wake")
        return sum(engine.wake_up() for engine in (self, *self.companions))

    def fall_asleep(self) -> int:
        """Put this engine alone to sleep."""
        self._before = self._fixed_logprobs()
        self.sharding.changed()
        return self._sleeper.sleep(self._in_memory())

    def wake_up(self) -> int:
        moved = self._sleeper.wake()
        check_wake_parity(OWNER, self._before, self._fixed_logprobs(), self.device)
        return moved

    def _in_memory(self) -> Iterator[torch.Tensor]:
        """Parts of `_tensors` on this rank."""
        return map(self.sharding.in_memory, self._tensors())

    def _tensors(self) -> Iterator[torch.Tensor]:
        """Every large tensor: parameters, buffers, gradients, master weights, optimiser state."""
        yield from self.model.parameters()
        yield from self.model.buffers()
        yield from (p.grad for p in self.model.parameters() if p.grad is not None)
        yield from self.updates.copies()

    @torch.no_grad()
    def _fixed_logprobs(self) -> torch.Tensor:
        """[T] fp32 log-probs of the fixed tokens, on the CPU."""
        return self.forward(self._fixed_micro_batch()).logprobs.float().cpu()

    def _fixed_micro_batch(self) -> MicroBatch:
        ids = self._fixed_tokens
        completion = PackedTrajectory(row=0, token_ids=ids, is_trained=np.ones(len(ids), bool))
        return build_micro_batch(self.model, [TrainGroup(EncodedPrompt.of_text(ids), (completion,))], self.device)


@contextmanager
def _exact(device: torch.device) -> Iterator[None]:
    """Make gradients on a CPU the same bits each time.

    A prompt's last hidden state predicts the first token of each completion, and threads would add up their gradients
    in the order in which they happen to come.
    """
    if device.type != "cpu":
        yield
        return
    filling: Any = torch.utils.deterministic
    before, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fills, filling.fill_uninitialized_memory = filling.fill_uninitialized_memory, False  # slow; to find mistakes by
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)
        filling.fill_uninitialized_memory = fills
