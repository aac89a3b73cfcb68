"""Base classes of configuration sections, and the sections of training inputs: model, data, reward. Each checks its own
values.

The text below a field is also its line in `asyncrl config-reference`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import date
from functools import cache
from typing import Any, ClassVar, Literal, TypeVar, get_origin

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    ValidationError,
    ValidationInfo,
    create_model,
    field_validator,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from asyncrl.plugins import Parts, sections_of

PARTS = ("vision_tower", "connector", "language_model")
"""Parts of a vision-language model, of which each can be left out of training."""


class Section(BaseModel):
    """Frozen, without unknown keys or infinite numbers; the text below a field is its documentation."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _read_as_written(cls, value: Any, info: ValidationInfo) -> Any:
        """Accept an empty section (its defaults) and names with commas for a list of text; `true` is no number."""
        annotation = cls.model_fields[info.field_name or ""].annotation
        if value is None and isinstance(annotation, type) and issubclass(annotation, Section):
            return {}
        if isinstance(value, str) and get_origin(annotation) is tuple and annotation == tuple[str, ...]:
            return [name.strip() for name in value.split(",") if name.strip()]
        if isinstance(value, bool) and annotation in (int, float):
            raise PydanticCustomError("bool_as_number", "expected a number")
        return value


class LoraConfig(Section):
    """Low-rank adapters (arXiv 2106.09685): only they are trained, and only they travel."""

    rank: int = Field(default=0, ge=0)
    """Rank of the adapters; 0 trains the model itself."""
    alpha: int = Field(default=0, ge=0)
    """The adapters' output is scaled by alpha / rank; 0 means twice the rank."""
    target_modules: str | tuple[str, ...] = "all-linear"
    """Linear layers with an adapter: `all-linear`, a list of ends of their names, or one regular expression of whole
    names. Never the output layer."""
    vision_tower: bool = False
    """Let target_modules reach the vision tower and the connector, too."""
    modules_to_save: tuple[str, ...] = ()
    """Parts of the connector that are trained whole beside the adapters, and saved with them as PEFT does: ends of
    their names, or `connector` for all of it, whatever its name is. Rollouts by hf."""

    @property
    def effective_alpha(self) -> int:
        return self.alpha or 2 * self.rank


class ModelConfig(Section):
    path: str
    """Hugging Face folder with model, tokenizer and processor, or `org/name` (or `org/name@revision`) of its hub."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the weights on both sides and on the wire; auto is bfloat16 where both sides are on GPUs, and under
    adapters on CPUs with AVX512-BF16 or AMX for a model 512 wide or more, else float32. 16-bit weights are trained on
    float32 master weights, in float16 with an adaptive loss scale; adapters are always float32."""
    quantization: str = ""
    """Precision of the learner's frozen base below adapters, a plug-in's name such as `nf4` (QLoRA); empty: dtype. The
    hf engine samples with the same values, other engines with a base in dtype."""
    float32_head: bool = False
    """Compute the output layer in float32 whatever dtype is, on both sides (MiniMax-M1, arXiv 2506.13585): logits are
    rounded to 16 bits otherwise. Not with vLLM, which computes them in dtype."""
    freeze_vision_tower: bool = True
    """Leave the vision tower (not the connector) out of training; with lora, only adapters are trained anyway."""
    freeze_connector: bool = False
    """Leave the connector, from the tower's features to the language model, out of training."""
    freeze_language_model: bool = False
    """Leave the language model with its embeddings and output layer out of training: what remains is the connector,
    and the vision tower where that is not frozen."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model folder."""
    min_pixels: int = Field(default=0, ge=0)
    """Pixels that a smaller image is enlarged to; 0 is what the model folder says. Images of the Qwen-VL families, no
    videos."""
    max_pixels: int = Field(default=0, ge=0)
    """Pixels that a larger image is reduced to; 0 is what the model folder says. Each (2 × patch size)² of them are a
    token."""
    template_date: str = ""
    """Day, as YYYY-MM-DD, that a chat template takes for today; empty: the day on which the run begins, which its
    config.yaml then says. Rollout servers take the learner's."""
    lora: LoraConfig = LoraConfig()

    @property
    def frozen_parts(self) -> tuple[str, ...]:
        """Parts of the model that `freeze_*` leave out of training."""
        return tuple(part for part in PARTS if getattr(self, f"freeze_{part}"))

    @property
    def pixel_limits(self) -> dict[str, int]:
        """`min_pixels` and `max_pixels`, where they are set."""
        limits = {"min_pixels": self.min_pixels, "max_pixels": self.max_pixels}
        return {name: pixels for name, pixels in limits.items() if pixels}

    @field_validator("template_date")
    @classmethod
    def _is_a_day(cls, day: str) -> str:
        try:
            return day and date.fromisoformat(day).isoformat()
        except ValueError:
            raise ValueError(f"{day!r} is no day: expected YYYY-MM-DD, such as 2026-01-31") from None

    @model_validator(mode="after")
    def _trained_parts_are_free(self) -> ModelConfig:
        if self.lora.modules_to_save and (self.freeze_connector or not self.lora.rank):
            other = "model.freeze_connector is true" if self.freeze_connector else "model.lora.rank is 0"
            raise ValueError(
                f"model.lora.modules_to_save trains the connector whole beside adapters, but {other}. Set "
                "model.lora.rank=16 and model.freeze_connector=false, or model.lora.modules_to_save=[]"
            )
        if self.lora.rank and self.lora.vision_tower and self.freeze_vision_tower:
            raise ValueError(
                "model.lora.vision_tower is true, but model.freeze_vision_tower (its default) leaves the vision tower "
                "out of training. Set model.freeze_vision_tower=false, or model.lora.vision_tower=false"
            )
        return self


class CurriculumConfig(Section):
    """Order of the training rows."""

    order_by: str = ""
    """Column of numbers by which rows are visited, the smallest (easiest) first, in every epoch; equal ones as
    data.shuffle says. Empty means no such order."""
    descending: bool = False
    """Largest number of order_by first, as for a column of pass rates."""


Purpose = Literal["rl", "sft", "environment"]
"""Use of rows: `rl` needs a column of answers in every file, `sft` one of targets, and an environment that judges alone
neither. A row without a value is a bad row."""


class DataConfig(Section):
    train_files: tuple[str, ...]
    """Parquet, JSONL or CSV files, image folders, or `org/name@split` of the `datasets` library."""
    val_files: tuple[str, ...] = ()
    """Held-out rows, never trained on; same kinds as train_files."""
    prompt_key: str = "prompt"
    """Column with the question: a string (which may contain `<image>` and `<video>`) or a list of chat messages, which
    may be JSON text, and whose parts may hold their own images and videos."""
    answer_key: str = "answer"
    """Column with the reference answer, handed to the rewards. An environment without reward functions needs none, and
    an empty name means that there is none."""
    image_key: str = "images"
    """Column with 0 to N images per row: paths, bytes, base64, `data:` URIs or a list of them. A missing column, or an
    empty name, means none beside those in the messages."""
    video_key: str = "videos"
    """Column with 0 to N videos per row, each a list of frames: paths or bytes of images, no video files."""
    video_fps: float = Field(default=2.0, gt=0)
    """Frames per second of the videos in video_key: places them in time for models that ask (Qwen2.5-VL, Qwen3-VL)."""
    target_key: str = "target"
    """Column with a right completion, for methods that learn from it. A row may have none."""
    image_dir: str = ""
    """Base of relative image and frame paths; empty means the folder of the data file."""
    format_prompt: str = ""
    """Jinja template of the question, or the file that holds it; it sees `content`, the text of the last user's message
    with `<image>` where an image stands, and every column. Empty means the question as it is."""
    system_prompt: str = ""
    """System message before the question, of which a row has none then; empty means none."""
    chat_template_kwargs: dict[str, JsonValue] = Field(default_factory=dict)
    """Values of names that the model's chat template reads, such as `{enable_thinking: false}` (Qwen3) or
    `{reasoning_effort: low}` (gpt-oss). A name that it does not read is refused with those that it does."""
    max_prompt_length: int = Field(default=2048, gt=0)
    """Tokens, image tokens included. A row with a longer prompt is a bad row. What an environment opens with
    counts, too: one that makes a prompt longer than this ends the run."""
    max_response_length: int = Field(default=512, gt=0)
    """Most tokens sampled per completion."""
    on_bad_row: Literal["skip", "stop"] = "skip"
    """Rows that cannot be read, rendered, processed or sent, are too long, or have no answer where others have one, all
    found before a run begins: `skip` leaves them out (counted, named in bad_rows.jsonl), `stop` refuses to begin."""
    shuffle: bool = True
    """Visit the training rows in a seeded random order, fresh each epoch."""
    curriculum: CurriculumConfig = CurriculumConfig()
    max_train_rows: int = Field(default=0, ge=0)
    """Use only the first rows; 0 means all."""
    max_val_rows: int = Field(default=0, ge=0)
    """Use only the first rows; 0 means all."""

    @property
    def prompt_columns(self) -> set[str]:
        """Columns that are no columns of the reward: it gets them otherwise. Functions written for TRL take the answer
        by the name of its column."""
        return {self.prompt_key, self.image_key, self.video_key} | ({"answer"} & {self.answer_key})


class RewardFunctionConfig(Section):
    function: str
    """Built-in name (docs/rewards.md), `file.py:function` or `package.module:function`, which takes a RewardSample or,
    as in TRL, `completions` and columns as lists, and returns a number or a dict of them."""
    weight: float = 1.0
    """Weight of this component in the sum."""
    name: str = ""
    """Name of the curve, and key of the number in a returned dict; empty means the function's own name."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Extra keyword arguments of the function. A text `env:NAME` stands for that environment variable."""
    group: bool = False
    """Call it once with all completions of a prompt, when the last is there: it takes a list of RewardSamples, or TRL's
    lists, and returns a list."""
    shapes: str = ""
    """Name of a component above, or `sum` for the weighted sum of all above: the function gets its value as `score`,
    and what it returns takes the place of it in the sum."""


class RewardConfig(Section):
    functions: tuple[RewardFunctionConfig, ...] = ()
    """Components; their weighted sum is the reward, beside what the turns of an environment earn. One that another one
    shapes is only shown. May be empty where an environment rewards by itself (tools only answer)."""
    accuracy: str = ""
    """Component reported as held-out accuracy; empty means the first, or the whole reward where there is none."""
    timeout_s: float = Field(default=15.0, gt=0)
    """Longest time for all components of one sample, or of one group; then its worker is killed and the trajectory is
    `timed_out`. A reward that is a plug-in may have its own (kwargs.timeout_s)."""
    workers: int = Field(default=2, gt=0)
    """Worker processes."""
    memory_limit_mib: int = Field(default=2048, gt=0)
    """Address space of one worker (each process that it starts gets the same)."""

    @model_validator(mode="after")
    def _known_accuracy(self) -> RewardConfig:
        names = self.component_names
        if len(set(names)) != len(names):
            raise ValueError(f"two reward components have one name: {names}. Set `name` on one of them")
        if self.accuracy and self.accuracy not in names:
            there = f"the components are {names}" if names else "there are no components (reward.functions)"
            raise ValueError(f"reward.accuracy is {self.accuracy!r}, but {there}")
        _shaped(self.functions)
        return self

    @property
    def weights(self) -> dict[str, float]:
        """Weight of each component in the sum: 0 for one in whose place another one counts."""
        counting, _ = _shaped(self.functions)
        return dict.fromkeys(self.component_names, 0.0) | counting

    @property
    def shaped(self) -> dict[str, dict[str, float]]:
        """The weighted components whose sum each component shapes, by its name; empty for one that shapes none."""
        return _shaped(self.functions)[1]

    @property
    def component_names(self) -> tuple[str, ...]:
        return tuple(component_name(function) for function in self.functions)

    @property
    def accuracy_component(self) -> str:
        """Name of the component that is the accuracy; empty: the whole reward, there being no components."""
        return self.accuracy or next(iter(self.component_names), "")


def component_name(function: RewardFunctionConfig) -> str:
    """The curve's name: the given one, or what stands after the last `:` of the function."""
    return function.name or function.function.rsplit(":", 1)[-1]


def _shaped(functions: Sequence[RewardFunctionConfig]) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Weights of the components that count in the sum, and what each component shapes. Raises ValueError."""
    counting: dict[str, float] = {}
    shaped: dict[str, dict[str, float]] = {}
    for function in functions:
        name, target = component_name(function), function.shapes
        if target == "sum":
            shaped[name], counting = counting, {}
        else:
            shaped[name] = {target: 1.0} if target else {}
        if not shaped[name] and target:
            raise ValueError(f"reward component {name!r} shapes the sum of the components above it, and there are none")
        if target and target != "sum":
            if target not in counting:
                choices = f"it can shape {', '.join([*counting, 'sum'])}" if counting else "there are none"
                raise ValueError(
                    f"reward component {name!r} shapes {target!r}, which is no component above it that still counts in "
                    f"the sum: {choices}"
                )
            if counting.pop(target) not in (0.0, 1.0):
                raise ValueError(
                    f"reward component {name!r} takes the place of {target!r} in the sum, so the weight of {target!r} "
                    f"would be lost: give it to {name!r}"
                )
        counting[name] = function.weight
    return counting, shaped


S = TypeVar("S", bound=Section)


def names_in(value: Any) -> list[str]:
    """Names in a list, or in a text with commas, that has not been checked yet."""
    items = value.split(",") if isinstance(value, str) else value if isinstance(value, list | tuple) else ()
    return [name for item in items if (name := str(item).strip())]


class OpenSection(Section):
    """A section such as `algorithm`: `algorithm.gae` exists only where `algorithm.adv_estimator` is gae.

    The sub-sections are typed, frozen and checked as all others are. Any other unknown key is refused.
    """

    model_config = ConfigDict(extra="allow")
    choices: ClassVar[Mapping[str, Parts[Any]]] = {}
    """Parts that may have a sub-section, by the key whose value names one of them, or a list of them."""

    @classmethod
    def chosen_sections(cls, given: Mapping[str, Any]) -> Mapping[str, type[Section]]:
        """Sub-sections by name that exist with these values, which have not been checked yet."""
        chosen = {
            name: parts.find(name)
            for key, parts in cls.choices.items()
            for name in names_in(given.get(key, cls.model_fields[key].default))
        }
        return sections_of(chosen)

    @classmethod
    def choice_keys(cls) -> Collection[str]:
        """Keys whose values choose parts."""
        return cls.choices

    @classmethod
    def possible_sections(cls) -> Mapping[str, type[Section]]:
        """Sub-sections by name of all parts that are installed, for suggestions and the reference page."""
        return sections_of({name: part for parts in cls.choices.values() for name, part in parts.all().items()})

    @classmethod
    def choice_of(cls, section: str, given: Mapping[str, Any]) -> str:
        """Choice with which the sub-section exists, and the present one: `algorithm.adv_estimator=gae (it is grpo)`."""
        key, parts = next((key, parts) for key, parts in cls.choices.items() if parts.find(section))
        default = cls.model_fields[key].default
        sign, now = "=" if isinstance(default, str) else "+=", given.get(key) or default or "empty"
        return f"{parts.key}{sign}{section} (it is {now})"

    @field_validator("*")
    @classmethod
    def _parts_are_there(cls, value: Any, info: ValidationInfo) -> Any:
        parts = cls.choices.get(info.field_name or "")
        if parts:
            for name in names_in(value):
                parts[name]
        return value

    @model_validator(mode="before")
    @classmethod
    def _check_sub_sections(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        fields = {key: value for key, value in given.items() if key in cls.model_fields}
        others = {key: value for key, value in given.items() if key not in cls.model_fields}
        chosen = cls.chosen_sections(given)
        unchosen = [key for key in others if key in cls.possible_sections() and key not in chosen]
        if unchosen:
            raise ValidationError.from_exception_data(cls.__name__, [cls._unchosen(key, given) for key in unchosen])
        return {**fields, **dict(_shell(cls.__name__, tuple(chosen.items())).model_validate(others))}

    @classmethod
    def _unchosen(cls, key: str, given: Mapping[str, Any]) -> InitErrorDetails:
        problem = PydanticCustomError(
            "unchosen_section", "exists only with {choice}", {"choice": cls.choice_of(key, given)}
        )
        return InitErrorDetails(type=problem, loc=(key,), input=given[key])

    def settings_of(self, section: type[S]) -> S:
        """The chosen part's settings. Raises LookupError where no chosen part has such a section."""
        for value in (self.model_extra or {}).values():
            if isinstance(value, section):
                return value
        raise LookupError(f"no chosen part of this section has settings of the class {section.__name__}")


@cache
def _shell(name: str, sections: tuple[tuple[str, type[Section]], ...]) -> type[Section]:
    """A section that has these sub-sections, and no other key."""
    fields: Any = {key: (each, each()) for key, each in sections}
    # No source has it: pydantic would look through the modules of all callers for its docstrings.
    return create_model(name, __base__=Section, __cls_kwargs__={"use_attribute_docstrings": False}, **fields)
