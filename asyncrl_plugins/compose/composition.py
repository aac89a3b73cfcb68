"""A vision-language model of separate parts: vision tower, connector, language model (`asyncrl compose`).

The parts keep their weights; the connector is new, or one that was trained before. The result is an ordinary LLaVA
folder of transformers (`LlavaForConditionalGeneration`) where that can hold the parts; two towers, a resampler, a
Q-Former and an output layer with a bias are a model of `modular_vlm.py`, which goes into the folder.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn

from asyncrl.config.parts import ROLLOUT_ENGINES
from asyncrl.config.sections import ModelConfig
from asyncrl.errors import UserError
from asyncrl.model_files.folder import model_folder
from asyncrl.models.export import export_model
from asyncrl.processing import torchvision_cpu
from asyncrl.processing.image_grids import FixedGrids, one_size
from asyncrl_plugins.compose.settings import Composition

logger = logging.getLogger(__name__)

MODULAR = "modular_vlm"
"""Model type of composed models that are no LLaVA of transformers."""

HAS_CLASS_TOKEN = {"siglip_vision_model": False, "clip_vision_model": True, "dinov2": True}
"""Vision towers by model type, and whether their features begin with a class token, which is left out."""
CONNECTOR = "multi_modal_projector."
"""Prefix of the connector's weights in a composed model's files."""
SAME_LOGITS = 1e-3
"""Largest difference of a logit of the language model, alone and composed."""
FLATTEN = (
    "{%- set flat = namespace(messages=[]) -%}{%- for message in messages -%}"
    "{%- if message['content'] is string -%}{%- set flat.messages = flat.messages + [message] -%}"
    "{%- else -%}{%- set joined = namespace(text='') -%}{%- for part in message['content'] -%}"
    "{%- set joined.text = joined.text + (IMAGE if part['type'] == 'image' else part['text']) -%}{%- endfor -%}"
    "{%- set flat.messages = flat.messages + [dict(message, content=joined.text)] -%}"
    "{%- endif -%}{%- endfor -%}{%- set messages = flat.messages -%}"
)
"""Prefix of a text model's chat template: contents of parts become text, with IMAGE for each image."""


def compose(parts: Composition, target: Path) -> str:
    """Write the new folder `target`; returns what it is made of, and which engines serve it.

    Raises UserError for parts that do not go together.
    """
    torchvision_cpu.install()
    from transformers.conversion_mapping import get_model_conversion_mapping

    tower, image_processor = _load_tower(parts.vision_tower, parts, "vision_tower")
    if parts.second_vision_tower:
        second, its_processor = _load_tower(parts.second_vision_tower, parts, "second_vision_tower")
        tower = _beside(parts, (tower, image_processor), (second, its_processor))
    language, tokenizer = _load_language(parts)
    template = _chat_template(parts, tokenizer)
    ids = torch.arange(min(8, language.config.vocab_size))[None]
    with torch.no_grad():
        alone = language(ids).logits
    image_token_id = _add_image_token(parts.image_token, language, tokenizer)
    model = _join(parts, tower, language, image_token_id)
    processor = _processor(parts, tower, image_processor, tokenizer, template)
    _check_text(model, language, ids, alone)
    _check_images(model, processor, tower)
    # Names in the file are those of released folders, which vLLM reads: only `from_pretrained` would see to that.
    if model.config.model_type != MODULAR:
        model._weight_conversions = get_model_conversion_mapping(model, add_legacy=False)
    export_model(model, processor, target)
    return _describe(model, parts, target)


def _load_tower(named: str, parts: Composition, setting: str) -> tuple[Any, Any]:
    """The tower with its weights, and its image processor."""
    from transformers import AutoConfig, AutoImageProcessor, AutoModel

    folder = model_folder(ModelConfig(path=named), setting)
    whole = AutoConfig.from_pretrained(folder)
    config = getattr(whole, "vision_config", None) or whole
    if config.model_type not in HAS_CLASS_TOKEN:
        raise UserError(
            f"{setting} is {named!r}, a model of the type {config.model_type}: its features are not "
            f"known here. Name one of the types {', '.join(HAS_CLASS_TOKEN)} (CLIP, SigLIP, DINOv2)"
        )
    if -parts.feature_layer > config.num_hidden_layers:
        raise UserError(
            f"feature_layer is {parts.feature_layer}, and the tower in {named} has "
            f"{config.num_hidden_layers} layers. Set feature_layer=-1, the last one"
        )
    loaded: Any = AutoModel.from_pretrained(folder, config=config, dtype="auto", output_loading_info=True)
    return _whole(loaded, folder), AutoImageProcessor.from_pretrained(folder)


def _beside(parts: Composition, *seen: tuple[Any, Any]) -> Any:
    """Two towers as one, for pixels as the first one's image processor makes them; `seen`: towers and processors."""
    from asyncrl_plugins.compose.modular_vlm import TwoTowers, TwoTowersConfig

    (first, its), (second, other) = seen
    size = one_size(other)
    if size is None:
        raise UserError(
            f"the image processor in {parts.second_vision_tower} ({type(other).__name__}) gives images sizes of their "
            "own. Set `size` with height and width, or `crop_size`, in its preprocessor_config.json"
        )
    (factor, mean, spread), (other_factor, other_mean, other_spread) = _normalised(its), _normalised(other)
    ratio = other_factor / factor
    make: Any = TwoTowersConfig
    config = make(
        first=first.config,
        second=second.config,
        mix=parts.mix,
        feature_layer=parts.feature_layer,
        class_tokens=[HAS_CLASS_TOKEN[each.config.model_type] for each in (first, second)],
        second_size=list(size),
        second_scale=(ratio * spread / other_spread).tolist(),
        second_shift=((ratio * mean - other_mean) / other_spread).tolist(),
    )
    with torch.device("meta"):
        towers: Any = TwoTowers(config)
    towers.first, towers.second = first, second.to(first.dtype)
    towers.config.dtype = first.dtype
    return towers.eval()


def _normalised(image_processor: Any) -> tuple[float, torch.Tensor, torch.Tensor]:
    """Normalisation of a colour x by a processor: (x * factor - mean) / spread, for each channel."""
    factor = float(image_processor.rescale_factor) if image_processor.do_rescale else 1.0
    if not image_processor.do_normalize:
        return factor, torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    mean, spread = (
        torch.tensor(each, dtype=torch.float64) for each in (image_processor.image_mean, image_processor.image_std)
    )
    return factor, mean, spread


def _load_language(parts: Composition) -> tuple[Any, Any]:
    """The causal language model with its weights, and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = model_folder(ModelConfig(path=parts.language_model), "language_model")
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    return _whole(loaded, folder).eval(), AutoTokenizer.from_pretrained(folder)


def _whole(loaded: tuple[Any, Any], folder: Path) -> Any:
    """The loaded model; UserError where some of its weights are not in the folder."""
    model, info = loaded
    missing = sorted(info["missing_keys"])
    if missing:
        raise UserError(
            f"{folder} lacks {len(missing)} weights of a {type(model).__name__}, such as {missing[0]}: they would be "
            "random. Name a folder with all of them"
        )
    return model


def _chat_template(parts: Composition, tokenizer: Any) -> str:
    if parts.chat_template:
        file = Path(parts.chat_template)
        if not file.is_file():
            raise UserError(f"chat_template is {parts.chat_template!r}, but there is no such file in {Path.cwd()}")
        return file.read_text(encoding="utf-8")
    if not isinstance(tokenizer.chat_template, str):
        raise UserError(
            f"the tokenizer in {parts.language_model} has no chat template: prompts could not be rendered. Name the "
            "instruction-tuned variant of the language model, or a file: chat_template=FILE.jinja"
        )
    return FLATTEN.replace("IMAGE", repr(parts.image_token)) + tokenizer.chat_template


def _add_image_token(token: str, language: Any, tokenizer: Any) -> int:
    """Id of the placeholder, which tokenizer and embeddings have afterwards. Its embedding is never read."""
    if tokenizer.convert_tokens_to_ids(token) in (None, tokenizer.unk_token_id):
        tokenizer.add_tokens([token], special_tokens=True)
    if len(tokenizer) > language.get_input_embeddings().weight.shape[0]:
        language.resize_token_embeddings(len(tokenizer))  # no further rows: they could be sampled
    return tokenizer.convert_tokens_to_ids(token)


def _join(parts: Composition, tower: Any, language: Any, image_token_id: int) -> Any:
    """The composed model: the parts' own weights, and a connector of the seed's or of a file."""
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    wide, narrow = tower.config.hidden_size, language.config.hidden_size
    if parts.connector == "identity" and wide != narrow:
        raise UserError(
            f"connector is identity, but features of the tower are {wide} wide and embeddings of the language model "
            f"{narrow}. Set connector=linear or connector=mlp"
        )
    head = language.get_output_embeddings()
    more = _beyond_llava(parts, tower, language)
    make: Any = LlavaConfig
    kind: Any = LlavaForConditionalGeneration
    if more is not None:
        from asyncrl_plugins.compose.modular_vlm import ModularVlmConfig, ModularVlmForConditionalGeneration

        make, kind = ModularVlmConfig, ModularVlmForConditionalGeneration
    config = make(
        vision_config=tower.config,
        text_config=language.config,
        image_token_index=image_token_id,
        projector_hidden_act="gelu" if parts.connector == "mlp" else "linear",
        vision_feature_select_strategy="default" if _has_class_token(tower) else "full",
        vision_feature_layer=-1 if parts.second_vision_tower else parts.feature_layer,
        tie_word_embeddings=language.config.tie_word_embeddings,
        **(more or {}),
    )
    with torch.device("meta"):
        model: Any = kind(config)
    if type(model.model.language_model) is not type(language.base_model):
        raise UserError(
            f"language_model is {parts.language_model!r}, a {type(language).__name__}, whose decoder is no "
            f"{type(model.model.language_model).__name__}: LLaVA cannot hold it. Name a plain causal language model"
        )
    model.model.vision_tower = tower
    model.model.language_model = language.base_model
    model.model.multi_modal_projector = _connector(parts, config)
    if parts.connector_weights:
        load_connector(model.model.multi_modal_projector, Path(parts.connector_weights))
    model.lm_head.weight = head.weight
    if head.bias is not None:
        model.lm_head.bias = head.bias
    model.generation_config = language.generation_config
    model.config.dtype = language.dtype
    return model.eval()


def _beyond_llava(parts: Composition, tower: Any, language: Any) -> dict[str, Any] | None:
    """Settings of a `ModularVlmConfig`; None where transformers' own LLaVA can hold the parts."""
    from transformers.models.blip_2.configuration_blip_2 import Blip2QFormerConfig
    from transformers.models.idefics2.configuration_idefics2 import Idefics2PerceiverConfig

    bias = language.get_output_embeddings().bias is not None
    text, vision = language.config, getattr(tower.config, "first", tower.config)
    make: Any = {"resampler": Idefics2PerceiverConfig, "qformer": Blip2QFormerConfig}.get(parts.connector)
    if make is None:
        return {"output_bias": bias} if bias or parts.second_vision_tower else None
    settings: dict[str, Any] = {
        "resampler": {
            "hidden_size": text.hidden_size,
            "resampler_n_latents": parts.queries,
            "resampler_depth": parts.connector_layers,
            "resampler_n_heads": text.num_attention_heads,
            "resampler_head_dim": text.hidden_size // text.num_attention_heads,
            "num_key_value_heads": text.num_attention_heads,
        },
        "qformer": {
            "hidden_size": vision.hidden_size,
            "encoder_hidden_size": tower.config.hidden_size,
            "intermediate_size": 4 * vision.hidden_size,
            "num_attention_heads": vision.num_attention_heads,
            "num_hidden_layers": parts.connector_layers,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
        },
    }[parts.connector]
    return {"connector_config": make(**settings), "image_seq_length": parts.queries, "output_bias": bias}


def _has_class_token(tower: Any) -> bool:
    """Features begin with a class token; those of two towers have none."""
    return HAS_CLASS_TOKEN.get(tower.config.model_type, False)


def _connector(parts: Composition, config: Any) -> nn.Module:
    """LLaVA's two layers, or queries that attend to features. A linear map is the first of the two layers with the
    second as the identity, and no activation."""
    from asyncrl_plugins.compose.modular_vlm import make_connector

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(parts.seed)
        connector: Any = make_connector(config)
        if parts.has_queries:  # transformers' first ones are all alike, and so they would stay
            queries = [p for name, p in connector.named_parameters() if name.endswith(("latents", "query_tokens"))]
            nn.init.normal_(queries[0], std=0.02)
            return connector
    layers = {"mlp": (), "linear": (connector.linear_2,), "identity": (connector.linear_1, connector.linear_2)}
    for layer in layers[parts.connector]:
        nn.init.eye_(layer.weight)
    with torch.no_grad():
        connector.linear_1.bias.zero_()
        connector.linear_2.bias.zero_()
    return connector


def load_connector(connector: nn.Module, source: Path) -> None:
    """Fill the connector from a safetensors file, or from those of a composed model's folder.

    Raises UserError for a file that is not there, and for weights of another form."""
    from safetensors.torch import load_file

    files = sorted(source.glob("*.safetensors")) if source.is_dir() else [source]
    if not files or not files[0].is_file():
        raise UserError(f"connector_weights is {str(source)!r}, where no safetensors file is. Name a file or a folder")
    found = {name: value for file in files for name, value in load_file(file).items()}
    if any(CONNECTOR in name for name in found):
        found = {name.partition(CONNECTOR)[2]: value for name, value in found.items() if CONNECTOR in name}
    wanted = {name: value.shape for name, value in connector.state_dict().items()}
    if wanted != {name: value.shape for name, value in found.items()}:
        odd = min(name for name in wanted | found if name not in found or found[name].shape != wanted.get(name))
        there = f"{list(found[odd].shape)}" if odd in found else "missing"
        expected = f"{list(wanted[odd])}" if odd in wanted else "not a weight of the connector"
        raise UserError(
            f"connector_weights: {odd} is {there} in {source}, and {expected} in the connector that the parts need. "
            "Set connector, connector_layers, queries and the parts as they were when it was trained"
        )
    connector.load_state_dict(found)


def _processor(parts: Composition, tower: Any, image_processor: Any, tokenizer: Any, template: str) -> Any:
    from transformers import LlavaProcessor

    has_class = _has_class_token(tower) and not parts.has_queries
    tokenizer.chat_template = template  # it is saved, too, in the same file
    processor = LlavaProcessor(
        image_processor=image_processor,
        tokenizer=tokenizer,
        patch_size=tower.config.patch_size,
        vision_feature_select_strategy="default" if has_class else "full",
        chat_template=template,
        image_token=parts.image_token,
        num_additional_image_tokens=int(has_class),
    )
    grids = FixedGrids.of(processor)
    if grids is None:
        raise UserError(
            f"the image processor in {parts.vision_tower} ({type(image_processor).__name__}) gives images sizes of "
            "their own. Set `size` with height and width, or `crop_size`, in its preprocessor_config.json"
        )
    # Each image has one size, so that it can be told as tokens more, or less, than patches.
    patches = int(grids.grids([(1, 1)]).prod())
    if parts.has_queries:
        processor.num_additional_image_tokens = parts.queries - patches
    elif parts.second_vision_tower and parts.mix == "tokens":
        height, width = tower.config.second_size
        patch = tower.config.second.patch_size
        processor.num_additional_image_tokens = (height // patch) * (width // patch)
    return processor


@torch.no_grad()
def _check_text(model: Any, language: Any, ids: torch.Tensor, alone: torch.Tensor) -> None:
    """The composed model must say of text what the language model says, whatever its output layer is."""
    composed = model(ids).logits[..., : alone.shape[-1]]
    difference = float((composed.float() - alone.float()).abs().max())
    if not difference <= SAME_LOGITS:
        raise UserError(
            f"{type(language).__name__} computes its logits otherwise than LLaVA's output layer (a scale or a "
            f"cap): they would differ by {difference:.3g}. Name a language model of another family"
        )


@torch.no_grad()
def _check_images(model: Any, processor: Any, tower: Any) -> None:
    """An image of the processor's must become as many features as the processor writes placeholders."""
    grids = FixedGrids.of(processor)
    assert grids is not None
    grid = grids.grids([(1, 1)])
    height, width = (int(n) * tower.config.patch_size for n in grid[0, 1:])
    expected = int(grids.tokens(grid)[0])
    pixels = torch.zeros((1, tower.config.num_channels, height, width), dtype=tower.dtype)
    config = model.config
    config.image_seq_length = expected
    try:
        features = tower(pixels, output_hidden_states=True).hidden_states[config.vision_feature_layer]
    except ValueError as problem:  # a size that the tower's positions do not have
        raise UserError(
            f"the image processor makes images of {height} x {width} pixels, which the tower does not take: {problem}. "
            "Set their size to the tower's image_size in its preprocessor_config.json"
        ) from problem
    found = features[:, int(config.vision_feature_select_strategy == "default") :]
    found = model.model.multi_modal_projector(found.float()).shape[1]
    assert found == expected, f"{found} features for {expected} placeholders"


def _describe(model: Any, parts: Composition, target: Path) -> str:
    def millions(part: nn.Module) -> str:
        return f"{sum(p.numel() for p in part.parameters()) / 1e6:.1f} M parameters"

    inner, config = model.model, model.config
    vllm = ROLLOUT_ENGINES.all().get("vllm")
    missing = vllm.unserved(config.to_dict()) if vllm else ""
    engines = "hf" if vllm is None else f"hf alone: vLLM knows no {missing}" if missing else "hf or vllm"
    second = f" and {parts.second_vision_tower}, their {parts.mix} mixed" if parts.second_vision_tower else ""
    towers, weights = f"{parts.vision_tower}{second}", parts.connector_weights or "new"
    return "\n".join(
        [
            f"{target}: a {type(model).__name__}; an image is {config.image_seq_length} tokens",
            f"  vision tower    {towers}: {millions(inner.vision_tower)}",
            f"  connector       {parts.connector}, {weights}: {millions(inner.multi_modal_projector)}",
            f"  language model  {parts.language_model}: {millions(inner.language_model)}",
            f"  rollout.engine  {engines}",
        ]
    )
