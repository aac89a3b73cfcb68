"""A LLaVA with what transformers' own cannot hold: two vision towers, a resampler or a Q-Former, a bias in the output
layer.

`asyncrl compose` makes such folders, and each of them has a copy of this file: `from_pretrained` of the Auto classes
loads it with `trust_remote_code=True` where asyncrl is not installed. So it imports torch and transformers alone.
"""

from typing import Any, ClassVar, Literal

import torch
from torch import nn
from torch.nn.functional import interpolate
from transformers import (
    AutoModel,
    AutoModelForImageTextToText,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaModel,
    LlavaPreTrainedModel,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.auto import CONFIG_MAPPING, AutoConfig
from transformers.models.blip_2.configuration_blip_2 import Blip2QFormerConfig
from transformers.models.blip_2.modeling_blip_2 import Blip2QFormerModel
from transformers.models.idefics2.configuration_idefics2 import Idefics2PerceiverConfig
from transformers.models.idefics2.modeling_idefics2 import Idefics2Connector
from transformers.models.llava.modeling_llava import LlavaMultiModalProjector

CONNECTORS: dict[str, Any] = {kind.model_type: kind for kind in (Blip2QFormerConfig, Idefics2PerceiverConfig)}
"""Connectors with a fixed number of queries, by the model type of their configuration."""


class TwoTowersConfig(PreTrainedConfig):
    """Two vision towers that see the same image. What is asked of one tower's configuration is the first one's."""

    model_type = "two_vision_towers"
    base_config_key = "vision_config"
    sub_configs: ClassVar[Any] = {"first": AutoConfig, "second": AutoConfig}

    first: Any = None
    second: Any = None
    mix: Literal["channels", "tokens"] = "channels"
    feature_layer: int = -2
    """Layer whose features are taken, of both towers."""
    class_tokens: Any = (False, False)
    """Whether features begin with a class token, which is left out."""
    second_size: Any = (224, 224)
    """(height, width) in pixels that the second tower takes."""
    second_scale: Any = (1.0, 1.0, 1.0)
    """The second tower's pixels are the first one's times this and plus `second_shift`, for each channel."""
    second_shift: Any = (0.0, 0.0, 0.0)

    def __post_init__(self, **kwargs: Any) -> None:
        self.first, self.second = (
            CONFIG_MAPPING[each["model_type"]](**each) if isinstance(each, dict) else each
            for each in (self.first, self.second)
        )
        if self.first is not None and self.second is not None:
            self.hidden_size = self.first.hidden_size + self.second.hidden_size
            for name in ("image_size", "patch_size", "num_channels", "num_hidden_layers", "num_attention_heads"):
                setattr(self, name, getattr(self.first, name))
        super().__post_init__(**kwargs)


class TwoTowers(PreTrainedModel):
    """Features of two towers, mixed (https://arxiv.org/abs/2401.06209, sec. 4).

    `channels`: at each place of the first tower's grid both towers' features, one behind the other; the second's are
    interpolated. `tokens`: the first tower's features and then the second's, each with zeros in the other's channels,
    so that a connector's first layer is a linear map of its own for each tower.
    """

    config: TwoTowersConfig  # pyright: ignore[reportIncompatibleVariableOverride]
    main_input_name = "pixel_values"
    input_modalities = ["image"]  # noqa: RUF012 (transformers declares no ClassVar)
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_attention_backend = True
    supports_gradient_checkpointing = True

    def __init__(self, config: TwoTowersConfig):
        super().__init__(config)
        self.first = AutoModel.from_config(config.first)
        self.second = AutoModel.from_config(config.second)
        self.post_init()

    def forward(self, pixel_values: torch.Tensor, **_: Any) -> BaseModelOutputWithPooling:
        """[N, 3, H, W] as the first tower's image processor makes them -> features [N, S, W1 + W2], the only one of
        `hidden_states`."""
        first = self.__features(0, pixel_values)
        second = self.__features(1, other := self.__second_pixels(pixel_values))
        if self.config.mix == "channels":
            grid = _grid(pixel_values, self.config.first)
            if (theirs := _grid(other, self.config.second)) != grid:
                images = second.transpose(1, 2).unflatten(2, theirs).float()
                images = interpolate(images, size=grid, mode="bilinear", align_corners=False)
                second = images.flatten(2).transpose(1, 2).to(second.dtype)
            mixed = torch.cat([first, second], dim=-1)
        else:
            pad = nn.functional.pad
            mixed = torch.cat([pad(first, (0, second.shape[-1])), pad(second, (first.shape[-1], 0))], dim=1)
        made: Any = BaseModelOutputWithPooling  # whose fields are annotated with classes of tensors
        return made(last_hidden_state=mixed, hidden_states=(mixed,))

    def __features(self, number: int, pixels: torch.Tensor) -> torch.Tensor:
        tower = (self.first, self.second)[number]
        states = tower(pixels, output_hidden_states=True, return_dict=True).hidden_states
        return states[self.config.feature_layer][:, int(self.config.class_tokens[number]) :]

    def __second_pixels(self, pixels: torch.Tensor) -> torch.Tensor:
        scale, shift = (
            torch.tensor(values, device=pixels.device)[:, None, None]
            for values in (self.config.second_scale, self.config.second_shift)
        )
        other, size = pixels.float() * scale + shift, tuple(self.config.second_size)
        if other.shape[-2:] != size:
            other = interpolate(other, size=size, mode="bicubic", align_corners=False, antialias=True)
        return other.to(pixels.dtype)


def _grid(pixels: torch.Tensor, config: Any) -> tuple[int, int]:
    """Rows and columns of patches."""
    height, width = pixels.shape[-2:]
    return height // config.patch_size, width // config.patch_size


class ModularVlmConfig(LlavaConfig):
    """LLaVA's configuration, in which `image_seq_length` counts."""

    model_type = "modular_vlm"
    sub_configs: ClassVar[Any] = {**LlavaConfig.sub_configs, "connector_config": AutoConfig}

    connector_config: Any = None
    """Configuration of a Q-Former (`Blip2QFormerConfig`) with `image_seq_length` queries, or of a perceiver resampler
    (`Idefics2PerceiverConfig`). None: LLaVA's two layers."""
    output_bias: bool = False
    """The output layer has a bias (Phi-2)."""

    def __post_init__(self, **kwargs: Any) -> None:
        if isinstance(self.vision_config, dict) and self.vision_config.get("model_type") == TwoTowersConfig.model_type:
            self.vision_config = TwoTowersConfig(**self.vision_config)
        if isinstance(self.connector_config, dict):
            self.connector_config = CONNECTORS[self.connector_config["model_type"]](**self.connector_config)
        super().__post_init__(**kwargs)


class QFormer(nn.Module):
    """BLIP-2's Q-Former (https://arxiv.org/abs/2301.12597, sec. 3.1): queries that attend to an image's features."""

    def __init__(self, config: Any):
        super().__init__()
        width = config.connector_config.hidden_size
        self.query_tokens = nn.Parameter(torch.zeros(1, config.image_seq_length, width))
        self.qformer = Blip2QFormerModel(config.connector_config)
        self.language_projection = nn.Linear(width, config.text_config.hidden_size)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """[N, S, W] -> [N, queries, D]"""
        queries = self.query_tokens.expand(len(features), -1, -1)
        found = self.qformer(query_embeds=queries, encoder_hidden_states=features, return_dict=True)
        return self.language_projection(found.last_hidden_state)


class Resampler(Idefics2Connector):
    """A gated layer, and a perceiver resampler (https://arxiv.org/abs/2204.14198, sec. 3.1.1) as Idefics2 has it."""

    def __init__(self, config: Any):
        super().__init__(_Resampled(config))

    def forward(self, features: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """[N, S, W] -> [N, queries, D]"""
        everywhere = torch.ones(features.shape[:2], dtype=torch.long, device=features.device)
        return super().forward(features, everywhere)


class _Resampled:
    """Model configuration as Idefics2's connector reads it."""

    def __init__(self, config: Any):
        self.vision_config, self.text_config = config.vision_config, config.text_config
        self.perceiver_config = config.connector_config


def make_connector(config: Any) -> nn.Module:
    """The connector that a configuration describes, with transformers' first weights."""
    described = getattr(config, "connector_config", None)
    if isinstance(described, Blip2QFormerConfig):
        return QFormer(config)
    return Resampler(config) if isinstance(described, Idefics2PerceiverConfig) else LlavaMultiModalProjector(config)


class ModularVlmModel(LlavaModel):
    """LLaVA's model; tower and connector are those of the configuration."""

    config: ModularVlmConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, config: Any):
        LlavaPreTrainedModel.__init__(self, config)
        vision = config.vision_config
        self.vision_tower = TwoTowers(vision) if isinstance(vision, TwoTowersConfig) else AutoModel.from_config(vision)
        self.multi_modal_projector = make_connector(config)
        self.language_model = AutoModel.from_config(config.text_config)
        self.post_init()


class ModularVlmForConditionalGeneration(LlavaForConditionalGeneration):
    """A vision-language model of parts, with its output layer."""

    config: ModularVlmConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, config: Any):
        LlavaPreTrainedModel.__init__(self, config)
        text = config.text_config
        self.model = ModularVlmModel(config)
        self.lm_head = nn.Linear(text.hidden_size, text.vocab_size, bias=config.output_bias)
        self.post_init()


ModularVlmConfig.register_for_auto_class()
ModularVlmForConditionalGeneration.register_for_auto_class("AutoModelForImageTextToText")


def register() -> None:
    """Tell the Auto classes of this process. Elsewhere they need `trust_remote_code=True`."""
    AutoConfig.register(ModularVlmConfig.model_type, ModularVlmConfig, exist_ok=True)
    AutoModel.register(ModularVlmConfig, ModularVlmModel, exist_ok=True)
    AutoModelForImageTextToText.register(ModularVlmConfig, ModularVlmForConditionalGeneration, exist_ok=True)
