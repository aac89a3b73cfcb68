"""The settings of `asyncrl compose`: parts of a vision-language model, and how they are put together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from asyncrl.config import yaml_text
from asyncrl.config.sections import Section
from asyncrl.errors import UserError, field_problem, file_hint


class Composition(Section):
    """A vision tower, a connector and a language model."""

    vision_tower: str
    """Folder or hub name of a CLIP, SigLIP or DINOv2 model; of CLIP and SigLIP the vision part is taken."""
    language_model: str
    """Folder or hub name of a causal language model, with its tokenizer."""
    second_vision_tower: str = ""
    """Folder or hub name of another such model, which sees the same images. Empty means none."""
    mix: Literal["channels", "tokens"] = "channels"
    """Combination of two towers: their features side by side at each place of the first one's grid, or their tokens one
    after the other (arXiv 2401.06209)."""
    connector: Literal["mlp", "linear", "identity", "resampler", "qformer"] = "mlp"
    """From the tower's features to the language model's embeddings: two layers with a GELU between them (LLaVA-1.5,
    arXiv 2310.03744), one linear map, or nothing, for parts of one width. Or a fixed number of queries that attend to
    the features: Idefics2's perceiver resampler, or BLIP-2's Q-Former (arXiv 2301.12597)."""
    queries: int = Field(default=64, ge=1)
    """Tokens of an image, with `resampler` and `qformer`."""
    connector_layers: int = Field(default=3, ge=1)
    """Layers of `resampler` and `qformer`; of a Q-Former every other one attends to the image."""
    connector_weights: str = ""
    """Trained connector of the same form: a safetensors file, or a folder of a composed model whose connector is taken.
    Empty means a new one."""
    feature_layer: int = Field(default=-2, lt=0)
    """Layer of the tower whose features are taken, from its end: -1 is the last one."""
    image_token: str = "<image>"
    """Placeholder of an image. It is added to the tokenizer if that has not got it."""
    chat_template: str = ""
    """Jinja file that renders image parts, too. Empty means the language model's own template, with images where the
    message has them."""
    seed: int = 0
    """Seed of the connector's initial weights."""

    @model_validator(mode="after")
    def _given_is_used(self) -> Composition:
        unused = [] if self.second_vision_tower else ["mix"]
        unused += [] if self.has_queries else ["queries", "connector_layers"]
        if given := [name for name in unused if name in self.model_fields_set]:
            raise ValueError(
                f"{' and '.join(given)} would do nothing: queries and connector_layers are of connector=resampler and "
                "connector=qformer, mix is of two towers (second_vision_tower)"
            )
        return self

    @property
    def has_queries(self) -> bool:
        return self.connector in ("resampler", "qformer")


def load_composition(words: Sequence[str]) -> Composition:
    """Read YAML files and `key=value` in order; later ones count. UserError lists every problem at once."""
    given: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        given |= {key.strip(): value} if equals else _read(Path(word))
    try:
        return Composition.model_validate(given)
    except ValidationError as error:
        problems = [_describe(detail) for detail in error.errors()]
    raise UserError("\n".join(["the parts do not make a model:", *(f"- {problem}" for problem in problems)]))


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise UserError(f"there is no file {file}: {file_hint(file)} Keys are given as key=value")
    value, _ = yaml_text.parse(file.read_text(encoding="utf-8"), str(file))
    if not isinstance(value, dict | None):
        raise UserError(f"{file} holds {value!r:.120}: expected lines such as `language_model: Qwen/Qwen2.5-0.5B`")
    return value or {}


def _describe(detail: Any) -> str:
    problem = field_problem(detail, Composition.model_fields)
    if detail["type"] != "missing":  # of settings that do not go together, `loc` is empty
        return problem
    return f"{problem}: give {detail['loc'][0]}=FOLDER, or org/name of the hub"
