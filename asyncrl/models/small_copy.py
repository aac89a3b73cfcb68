"""A small random model of a folder's family, to try at the start of a run how the family computes.

It has the family's settings, few layers, one of each kind, and as little width as its shapes allow. All parameters of
its language part are redrawn, so that sinks, decays, convolutions and biases change what comes out: initial values
often hide them.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from asyncrl.attention.shared_prefix import SHARED_PREFIX_ATTENTION
from asyncrl.attention.stateful_layers import hand_on_layout
from asyncrl.config.sections import ModelConfig
from asyncrl.model_files.folder import describe_model, model_folder
from asyncrl.models.loading import attention_of_parts, model_class
from asyncrl.models.parts import part_of

logger = logging.getLogger(__name__)

LAYERS = 5
"""Most layers, unless a family has more kinds of them."""
VOCABULARY = 128
SAME_LOGPROB = 1e-3
"""Nats by which log-probs of two ways to compute a row may differ, in float32."""
MOST_PARAMETERS = 5 * 10**8
"""Limit of a copy: drawing more takes seconds."""
DRAWN = 65_537
"""Normal numbers from which all parameters are taken: a prime, so that rows of a matrix begin at other places."""
WINDOW = 5
"""Tokens that a layer with a window sees in the copy, so that short rows are cut, too."""
_SIZES = {
    "vocab_size": VOCABULARY,
    "intermediate_size": 64,
    "ffn_dim": 64,
    "n_inner": 64,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "experts": 16,
    "window": WINDOW,
    "chunk_size": WINDOW,
}
"""Most that a number of the configuration may be whose name is one of these, or has it within."""
_FAMILIES: dict[tuple[str, bytes], SmallFamily] = {}


def family_of(config: ModelConfig) -> SmallFamily:
    """The family of a folder, found once in a process for each configuration file, or folder that may have code of its
    own; not each has a copy that can be computed."""
    described = (model_folder(config) / "config.json").read_bytes()
    key = config.path if config.trust_remote_code else "", described
    if key not in _FAMILIES:
        _FAMILIES[key] = SmallFamily(config)
    return _FAMILIES[key]


class SmallFamily:
    """Small copies of the model in a folder: in float32, on the CPU, for evaluation, all with the same parameters."""

    attention: str | None
    """Attention that its language part computes with outside of packed groups; None: transformers' choice."""
    temperature: float
    """Temperature of log-probs to compare, at which no token has them all."""

    problem = ""
    """Reason why no copy can be computed; the model's own pass with eager attention is then all that is known."""

    def __init__(self, config: ModelConfig):
        self._config = config
        described = describe_model(model_folder(config), trust_remote_code=config.trust_remote_code)
        self.name: str = described.model_type
        problem = ""
        for self.described in _smaller(described):
            try:
                with torch.device("meta"):
                    named = self._build("eager").named_parameters()
                parameters = sum(p.numel() for n, p in named if part_of(n.split(".")) == "language_model")
                if parameters <= MOST_PARAMETERS:
                    self._find_plain_attention()
                    return
                problem = problem or f"its smallest layers have {parameters:,} parameters"
            except Exception as error:  # of the family's own code: the next copy is larger
                problem = first_line(error)
        self.attention, self.temperature = "eager", 1.0
        self.problem = f"no small copy of its family {self.name} can be computed to check it ({problem})"

    @torch.no_grad()
    def _find_plain_attention(self) -> None:
        """Take transformers' choice where it has the log-probs of eager attention: torch's kernels have no caps."""
        ids = torch.arange(4, 4 + 2 * WINDOW)[None]
        models = (self.model(attention) for attention in ("eager", None))
        eager, chosen = (model(input_ids=ids, use_cache=False).logits for model in models)
        self.temperature = max(1.0, float(eager.std()))
        self.attention = None if float((eager - chosen).abs().max()) <= SAME_LOGPROB * self.temperature else "eager"

    def model(self, attention: str | None) -> Any:
        """A copy with `attention` in its language part; None: transformers' own choice."""
        with torch.random.fork_rng(devices=[]):
            model = self._build(attention)
        _draw(model)
        return model

    def _build(self, attention: str | None) -> Any:
        """A model without initial values."""
        from transformers.initialization import no_init_weights

        with no_init_weights():
            model = model_class(self.described).from_config(
                copy.deepcopy(self.described),
                dtype=torch.float32,
                attn_implementation=attention_of_parts(self.described, attention),
                trust_remote_code=self._config.trust_remote_code,
            )
            model.tie_weights()
        if attention == SHARED_PREFIX_ATTENTION:
            hand_on_layout(model)
        return model.eval().requires_grad_(False)


def first_line(error: Exception) -> str:
    """An error of a family's own code, for people."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _draw(model: Any) -> None:
    """Give each parameter of the language part values of its own, of such a size that states stay about 1: stretches of
    one draw, since normal numbers for all would take most of a check."""
    drawn = torch.randn(DRAWN, generator=torch.Generator().manual_seed(0))
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    place = 0
    for name, parameter in model.named_parameters():
        if part_of(name.split(".")) != "language_model":
            continue
        std, shift = 1.0, 0.0
        if parameter.ndim < 2:
            std, shift = 0.5, float(name.endswith("weight"))  # of a norm
        elif id(parameter) not in tables:
            std = 1 / math.sqrt(math.prod(parameter.shape[1:]) ** (1 / (parameter.ndim - 1)))
        values, flat = (drawn * std + shift).roll(-place), parameter.view(-1)
        rest = flat.numel() % DRAWN
        flat[: flat.numel() - rest].view(-1, DRAWN).copy_(values)
        flat[flat.numel() - rest :].copy_(values[:rest])
        place = (place + rest) % DRAWN


# --- smaller configurations -------------------------------------------------------------------


def _smaller(hf_config: Any) -> Iterator[Any]:
    """Configurations of the family, the smallest first, last the folder's own: not every family's shapes are free."""
    for layers, sizes, narrow in (
        (LAYERS, _SIZES, True),
        (LAYERS, _SIZES, False),
        (2, {"vocab_size": VOCABULARY}, False),
    ):
        described = copy.deepcopy(hf_config)
        try:
            parts = [getattr(described, name, None) for name in described.sub_configs]
            text = getattr(described, "text_config", None) or described
            for part in {id(part): part for part in (*parts, described, text) if part is not None}.values():
                _shrink(part, layers if part in (described, text) else 1, sizes)
            if narrow:
                _narrow(text)
        except Exception as error:  # the configuration itself refuses
            logger.debug("%s cannot be made smaller: %s", hf_config.model_type, first_line(error))
            continue
        yield described
    yield hf_config


def _shrink(described: Any, most_layers: int, sizes: Mapping[str, int]) -> None:
    """Fewer layers, and at most `sizes`."""
    layers = getattr(described, "num_hidden_layers", None) or getattr(described, "depth", None)
    if isinstance(layers, int) and layers > 1:
        kept = _kept_layers(described, layers, most_layers)
        for name, value in list(vars(described).items()):
            if _is_by_layer(name, value, layers):
                picked = [value[layer] for layer in kept]
                setattr(described, name, "".join(picked) if isinstance(value, str) else type(value)(picked))
            elif isinstance(value, dict) and value and all(isinstance(key, int) for key in value):
                setattr(described, name, {i: value[layer] for i, layer in enumerate(kept) if layer in value})
        if shared := getattr(described, "num_kv_shared_layers", 0):
            described.num_kv_shared_layers = min(shared, len(kept) // 2)
        setattr(described, "num_hidden_layers" if hasattr(described, "num_hidden_layers") else "depth", len(kept))
    for name, value in list(vars(described).items()):
        most = next((most for part, most in sizes.items() if part in name), None)
        if most is None:
            continue
        if isinstance(value, int) and not isinstance(value, bool) and value > most:
            setattr(described, name, most)
        elif isinstance(value, list | tuple) and value and all(isinstance(each, int) for each in value):
            setattr(described, name, type(value)(min(each, most) for each in value))
    if getattr(described, "pad_token_id", None) is not None:
        described.pad_token_id = 0  # in any vocabulary, and in no row here


def _is_by_layer(name: str, value: Any, layers: int) -> bool:
    """True for a list with something of each layer; a pattern has a letter for each."""
    listed = isinstance(value, list | tuple) or (isinstance(value, str) and "pattern" in name)
    return listed and len(value) == layers


def _kept_layers(described: Any, layers: int, most: int) -> Sequence[int]:
    """The first layers, or the first of each kind where kinds are listed layer by layer, each twice: what one layer
    shares with another of its kind is there, too."""
    listed = [
        value
        for name, value in vars(described).items()
        if _is_by_layer(name, value, layers) and len(set(map(str, value))) < layers
    ]
    kinds = [str(kind) for kind in zip(*listed, strict=True)]
    seen: dict[str, list[int]] = {}
    for layer, kind in enumerate(kinds):
        seen.setdefault(kind, []).append(layer)
    chosen = sorted(layer for places in seen.values() for layer in places[:2])
    return chosen if len(chosen) > 1 and most > 1 else range(min(layers, most))


def _narrow(text: Any) -> None:
    """Few heads of the width that they have, in attention and in recurrences whose heads make up the whole width."""
    width = text.hidden_size
    if heads := getattr(text, "num_attention_heads", 0):
        key_heads = getattr(text, "num_key_value_heads", None) or heads
        head_width = getattr(text, "head_dim", None) or width // heads
        kept = min(key_heads, 4 if heads == key_heads else 2)
        text.num_attention_heads = kept * min(heads // key_heads, 2)
        if key_heads > kept:
            text.num_key_value_heads = kept
        text.hidden_size = text.num_attention_heads * head_width
    elif getattr(text, "attention_hidden_size", 0) == width:  # RWKV has no heads
        text.hidden_size = text.attention_hidden_size = 128
    else:
        text.hidden_size = 2 * text.head_dim
    if states := getattr(text, "linear_num_key_heads", 0):
        text.linear_num_value_heads = 2 * (text.linear_num_value_heads // states)
        text.linear_num_key_heads = 2
    expand = getattr(text, "mamba_expand", None) or getattr(text, "expand", 0)
    for heads, head_width in (("mamba_n_heads", "mamba_d_head"), ("num_heads", "head_dim")):
        if expand and getattr(text, heads, 0) * getattr(text, head_width, 0) == expand * width:
            setattr(text, heads, expand * text.hidden_size // getattr(text, head_width))
