"""Memory of a model's passes, measured on the meta device.

Weights, gradients, master weights, AdamW's moments, KV cache and publications are counted. What a pass adds at its peak
is rehearsed on torch's meta device through the model's own code; kernels' own workspaces are not seen.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch

from asyncrl.attention import shared_prefix
from asyncrl.attention.masked_attention import window_of
from asyncrl.attention.prefix_kernels import Group
from asyncrl.attention.shared_prefix import SharedPrefixLayout, UnpackableError, make_layout
from asyncrl.config.installed_methods import chosen_hooks
from asyncrl.config.parts import BASE_WEIGHTS, BLOCK_8BIT, GRADIENTS_IN_FLIGHT, LEARNER_ENGINES, SMALLEST_8BIT
from asyncrl.config.schema import RunConfig
from asyncrl.config.sections import DataConfig
from asyncrl.config.service_sections import Optimizer
from asyncrl.devices.device import gpu_bytes
from asyncrl.errors import UserError
from asyncrl.memory_plan import GIB
from asyncrl.memory_plan.divided import DividedModel, divide
from asyncrl.memory_plan.live_bytes import LiveBytes, cuda_kernels, nbytes
from asyncrl.model_files.folder import read_config
from asyncrl.models.loading import has_vision, skeleton
from asyncrl.models.lora import add_adapter, resolve_adapter
from asyncrl.models.output_head import OutputHead, add_value_head
from asyncrl.models.parts import checkpoint_layers, freeze_parts, gathered_units
from asyncrl.models.published import published_tensors
from asyncrl.plugins import implementation
from asyncrl.processing.processor import PLACEHOLDER_ID_NAMES, special_token_ids

logger = logging.getLogger(__name__)

META = torch.device("meta")
UNSEEN_GPU = 80 * GIB
"""Memory of the GPU that is meant where there is none, and no budget."""


class NoPlanError(UserError):
    """A model's memory cannot be measured without its weights; it may be trained all the same."""


@dataclass(frozen=True)
class ModelBytes:
    """A model's parts, and what passes through it add to them. Nothing of it depends on `rollout` or `trainer`."""

    parameters: int
    """Number of parameters."""
    trained: int
    """Number of parameters that are trained."""
    weights: int
    held: int
    """Weights as the learner has them: fewer bytes with model.quantization."""
    gradients: int
    moments: int
    """AdamW's two, in fp32 as the gradients are, or in 8 bits."""
    masters: int
    """fp32 copies of what is trained in bf16, or with learner.cpu_offload in any dtype."""
    arriving: int
    """Pinned buffers of weights on their way to the device with learner.cpu_offload."""
    passing: int
    """Most that a forward and backward pass adds to weights, gradients, masters and moments."""
    published: int
    """Bytes of one policy version on the wire."""
    prefill: int
    """Most that a pass without gradients adds for one prompt of the greatest length, beside its keys and values."""
    cache_per_token: int
    """Keys and values of every layer."""
    decode_per_token: int
    """Copies of a layer's keys and values for every head that shares them; more than one of them that grows."""
    vocabulary: int
    critic: ModelBytes | None = None
    """The critic's own, where the algorithm needs one."""
    reference: int = 0
    """Weights of a reference policy of its own, with its moving averages where they are not the weights themselves, and
    of models that methods load."""
    in_layers: int = 0
    """Most of `passing` once the last hidden states have their gradient."""
    divided: DividedModel | None = None
    """Model divided over ranks, where learner.engine divides it; `passing` is then without gathered weights."""
    divided_references: tuple[DividedModel, ...] = ()

    @property
    def kept(self) -> int:
        """Bytes that outlast a step: weights, master weights and moments."""
        return self.held + self.masters + self.moments

    @property
    def offloaded(self) -> int:
        """Bytes that are in host memory with learner.cpu_offload of one process."""
        return self.masters + self.gradients + self.moments + self.arriving


def rehearse(config: RunConfig) -> ModelBytes:
    """Measure a model on the meta device; raises NoPlanError if it cannot run there. Takes seconds."""
    engine = LEARNER_ENGINES[config.learner.engine]
    if engine.divides_model and not engine.memory:
        planned = [name for name, each in LEARNER_ENGINES.all().items() if each.memory or not each.divides_model]
        raise NoPlanError(
            f"memory cannot be planned for learner.engine={config.learner.engine}, only for {' and '.join(planned)}. "
            "Leave gpu_memory.budget_gib at 0, and try it with a small batch.tokens_per_microbatch"
        )
    described = read_config(config.model)  # refuses what can be planned and not trained
    try:
        critic = None
        if "critic" in config.algorithm.needs:
            critic = _rehearse(config.model_copy(update={"model": config.critic_model}), critic=True)
        reference, divided = _reference_bytes(config)
        return replace(_rehearse(config), critic=critic, reference=reference, divided_references=divided)
    except UnpackableError as problem:
        raise NoPlanError(
            f"memory cannot be planned for models of the family {described.get('model_type')} ({config.model.path}): "
            f"their rows are computed one at a time ({problem}). Leave gpu_memory.budget_gib at 0, and set "
            "batch.tokens_per_microbatch to a number"
        ) from problem
    except UserError:
        raise
    except Exception as problem:
        logger.debug("the rehearsal of %s failed", config.model.path, exc_info=True)
        family = described.get("model_type", "a model without model_type")
        raise NoPlanError(
            f"memory cannot be planned for models of the family {family} ({config.model.path}): a rehearsal without "
            f"weights failed ({type(problem).__name__}: {' '.join(str(problem).split())[:200]}). It may be trained all "
            "the same: leave gpu_memory.budget_gib at 0, and try it with a small batch.tokens_per_microbatch"
        ) from problem


def _rehearse(config: RunConfig, *, critic: bool = False) -> ModelBytes:
    shared_prefix.register()
    model = skeleton(config.model, text_attention=shared_prefix.SHARED_PREFIX_ATTENTION)
    fewer = implementation(base.planned)(model) if (base := BASE_WEIGHTS.find(config.model.quantization)) else 0
    spec = resolve_adapter(config.model)
    if spec is not None:
        add_adapter(model, spec)
        model.to(META)
    if not config.model.lora.rank:
        freeze_parts(model, config.model)
    if critic:
        add_value_head(model, META)
    if config.learner.gradient_checkpointing:
        checkpoint_layers(model, config.learner.gradient_checkpointing)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    weights = [*model.parameters(), *model.buffers()]
    divided = divide(model) if config.learner.is_divided else None
    sums = [torch.empty_like(parameter, dtype=torch.float32) for parameter in trained]
    if divided:
        _forget_gradients_of_layers(model)
    else:
        _accumulate(trained, sums, offloads=config.learner.offloads_masters)
    heads_peak: list[int] = []
    with LiveBytes("meta", known=[*weights, *sums]) as training, cuda_kernels():

        def head_is_done(_: torch.Tensor) -> None:
            if not heads_peak:
                heads_peak.append(training.peak)
                training.peak = training.live

        train_pass(model.train(), config, META, critic=critic, head_is_done=head_is_done)
    prompt = config.data.max_prompt_length
    with torch.no_grad(), LiveBytes("meta", known=weights) as prefill, cuda_kernels():
        _hidden(model.eval(), make_layout([(prompt, ())], META, model.dtype, window=window_of(model.config)), prompt)
    text = getattr(model.config, "text_config", None) or model.config
    key_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    layer_cache = 2 * key_heads * width * getattr(torch, config.model.dtype).itemsize
    return ModelBytes(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        trained=sum(parameter.numel() for parameter in trained),
        weights=nbytes(weights),
        held=nbytes(weights) - fewer,
        gradients=nbytes(sums),
        moments=sum(_moments(parameter.numel(), config.learner.optimizer) for parameter in trained),
        masters=sum(
            4 * parameter.numel()
            for parameter in trained
            if parameter.dtype != torch.float32 or config.learner.offloads_masters
        ),
        arriving=GRADIENTS_IN_FLIGHT * max(parameter.nbytes for parameter in trained),
        passing=max(heads_peak[0], training.peak),
        published=nbytes(trained if config.model.lora.rank else (t for _, t in published_tensors(model))),
        prefill=prefill.peak,
        cache_per_token=text.num_hidden_layers * layer_cache,
        decode_per_token=text.num_attention_heads // key_heads * layer_cache,
        vocabulary=text.vocab_size,
        in_layers=training.peak,
        divided=divided,
    )


def _accumulate(trained: Sequence[torch.nn.Parameter], sums: Sequence[torch.Tensor], *, offloads: bool) -> None:
    """Let gradients be added to `sums`, which are there from the second micro-batch on, or leave the device."""
    leaving, largest = deque[tuple[torch.Tensor, ...]](), max(parameter.numel() for parameter in trained)
    for parameter, gradient in zip(trained, sums, strict=True):
        parameter.grad_dtype = torch.float32
        if offloads:
            parameter.register_post_accumulate_grad_hook(partial(_take, leaving, GRADIENTS_IN_FLIGHT * 4 * largest))
        else:
            parameter.grad = gradient


def _moments(elements: int, optimizer: Optimizer) -> int:
    """Bytes of the two moments of a tensor; with 8 bits a float32 scale for each block."""
    if optimizer == "adamw" or elements < SMALLEST_8BIT:
        return 2 * 4 * elements
    return 2 * (elements + 4 * -(-elements // BLOCK_8BIT))


def _take(leaving: deque[tuple[torch.Tensor, ...]], limit: int, parameter: torch.Tensor) -> None:
    """Take a gradient off the device, as learner/training/offloaded_masters.py does: the last ones, with the sums that
    they are added to, are still there, up to this many bytes."""
    pair = cast(torch.Tensor, parameter.grad), torch.empty_like(parameter, dtype=torch.float32)
    while leaving and sum(each.nbytes for held in leaving for each in held) + sum(each.nbytes for each in pair) > limit:
        leaving.popleft()
    leaving.append(pair)
    parameter.grad = None


def _forget_gradients_of_layers(model: torch.nn.Module) -> None:
    """Free the gradients of layers, which `DividedModel.working` counts; those of all that belongs to no layer stay to
    the end of the pass."""

    def forget(parameter: torch.Tensor) -> None:
        parameter.grad = None

    for module, _ in gathered_units(model):
        for parameter in module.parameters() if module is not model else ():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(forget)


def _reference_bytes(config: RunConfig) -> tuple[int, tuple[DividedModel, ...]]:
    models = [skeleton(model) for setting, model in config.other_models if setting != "critic.path"]
    for model in models:
        freeze_parts(model, config.model)
    averaged = [p for model in models for p in model.parameters() if p.requires_grad and p.dtype != torch.float32]
    averages = sum(4 * p.numel() for p in averaged) if config.reference.ema else 0
    divided = tuple(map(divide, models)) if config.learner.is_divided else ()
    return sum(nbytes([*model.parameters(), *model.buffers()]) for model in models) + averages, divided


# --- passes --------------------------------------------------------------------------------------


def train_pass(
    model: Any,
    config: RunConfig,
    device: torch.device,
    *,
    critic: bool = False,
    head_is_done: Callable[[torch.Tensor], None] | None = None,
) -> None:
    """Forward and backward over a full micro-batch: every token's logits, or its value, and images in the place of
    every prompt. `head_is_done` is called with the gradient of the states that the head takes."""
    tokens, data = config.batch.microbatch_tokens, config.data
    length = min(tokens, data.max_prompt_length + config.batch.group_size * data.max_response_length)
    image_tokens = math.ceil(tokens / length) * data.max_prompt_length
    full, rest = divmod(tokens, length)
    groups = [_group(each, data) for each in (*[length] * full, rest) if each]
    layout = make_layout(groups, device, model.dtype, window=window_of(model.config))
    packed = torch.arange(tokens, device=device)
    chosen_from = _hidden(model, layout, image_tokens)[0, packed]
    if head_is_done:
        chosen_from.register_hook(head_is_done)
    if critic:
        model.value_head(chosen_from.float()).sum().backward()
        return
    banned = sorted(special_token_ids(model.config, PLACEHOLDER_ID_NAMES))
    banned = torch.tensor(banned, dtype=torch.long, device=device)
    memory = gpu_bytes(on := config.learner.device, config.gpu_memory.budget_gib) or (on != "cpu") * UNSEEN_GPU
    head = OutputHead(model, temperature=config.rollout.temperature, banned=banned, gpu_bytes=memory)
    found = chosen_hooks("loss_hook", config.algorithm).values()
    hooks = [implementation(method.implementation)(settings) for method, settings in found]
    trains_entropy = config.algorithm.entropy_coeff or any(hook.trains_entropy for hook in hooks)
    entropy = "gradient" if trains_entropy else "value"
    outputs = head(chosen_from, torch.zeros_like(packed), entropy=entropy)
    assert outputs.entropies is not None
    loss = outputs.logprobs.sum() - outputs.entropies.sum()
    for hook in (each for each in hooks if not hasattr(each, "before_pass")):  # its pass is there at the same time
        again = _hidden(model, layout, image_tokens)[0, packed]
        if head_is_done:
            again.register_hook(head_is_done)
        more = head(again, torch.zeros_like(packed), entropy="gradient" if hook.trains_entropy else "none")
        loss = loss + more.logprobs.sum() + (0.0 if more.entropies is None else more.entropies.sum())
    loss.backward()


def _group(tokens: int, data: DataConfig) -> Group:
    """A group of so many tokens, its prompt and completions as long as they may be."""
    prompt = min(tokens, data.max_prompt_length)
    completions, rest = divmod(tokens - prompt, data.max_response_length)
    return prompt, [*[data.max_response_length] * completions, *([rest] if rest else [])]


def _hidden(model: Any, layout: SharedPrefixLayout, image_tokens: int) -> torch.Tensor:
    """[1, T, D] of packed tokens after the text layers, with images in the place of as many of them."""
    tokens, device = layout.num_tokens, model.device
    embedded = model.get_input_embeddings()(torch.zeros((1, tokens), dtype=torch.long, device=device))
    if has_vision(model.config):
        places = torch.zeros(embedded.shape, dtype=torch.bool, device=device)
        features = image_features(model, min(image_tokens, tokens), device)
        embedded = embedded.masked_scatter(places, features)
        del features, places
    text = getattr(model.config, "text_config", None) or model.config
    mrope = "mrope_section" in (getattr(text, "rope_parameters", None) or {})
    return model.get_decoder()(
        inputs_embeds=embedded,
        attention_mask=torch.ones((1, 1, 1, 1), dtype=torch.bool, device=device),  # else it makes one, from values
        position_ids=torch.zeros((3, 1, tokens) if mrope else (1, tokens), dtype=torch.long, device=device),
        use_cache=False,
        shared_prefix=layout,
    ).last_hidden_state


def image_features(model: Any, image_tokens: int, device: torch.device) -> torch.Tensor:
    """[N, D] of at least `image_tokens` tokens, through the model's own tower and connector."""
    vision = model.config.vision_config
    if hasattr(vision, "temporal_patch_size"):  # Qwen's towers take flat patches: one image that is nearly square
        side = vision.spatial_merge_size  # one token is side x side patches
        height = math.isqrt(image_tokens)
        values = None if device.type == "meta" else device  # the tower reads them
        grid = torch.tensor([[1, side * height, side * -(-image_tokens // height)]], device=values)
        patches = int(grid.prod())
        width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        pixels = torch.empty((patches, width), device=device)
        windows: dict[str, torch.Tensor] = {}
        if getattr(vision, "window_size", 0):  # one window: the tensors of thousands are as large together
            windows["window_index"] = torch.arange(patches // side**2, device=device)
            windows["cu_window_seqlens"] = torch.tensor([0, patches], device=values)
        tower = model.model.visual
        return tower(pixels.type(tower.dtype), grid_thw=grid, **windows).pooler_output
    # CLIP's and SigLIP's towers take whole images of the size in the configuration.
    height, width = vision.image_size if not isinstance(vision.image_size, int) else [vision.image_size] * 2

    def features(images: int) -> torch.Tensor:
        pixels = torch.empty((images, vision.num_channels, height, width), device=device, dtype=model.dtype)
        output = model.get_image_features(pixels).pooler_output
        return output.flatten(0, -2) if isinstance(output, torch.Tensor) else torch.cat(tuple(output))

    with torch.no_grad():
        tokens_per_image = len(features(1))
    return features(-(-image_tokens // tokens_per_image))
