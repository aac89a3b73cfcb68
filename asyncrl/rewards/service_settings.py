"""Settings of a reward model and of a judge: `kwargs` of their entries in `reward.functions`, and their checks."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import jinja2
from pydantic import Field, ValidationError

from asyncrl.config.sections import ModelConfig, RewardFunctionConfig, Section, component_name
from asyncrl.errors import UserError
from asyncrl.suggest import field_problem

QUESTION = """Grade {{ "the answers" if completions|length > 1 else "the answer" }} to a question.

Question:
{{ prompt }}
{% if answer is not none %}
Reference answer:
{{ answer }}
{% endif %}
{% for text in completions %}
Answer{{ " %d" % loop.index if completions|length > 1 else "" }} to grade:
{{ text }}
{% endfor %}
How good is {{ "each answer" if completions|length > 1 else "it" }}, from {{ lowest }} (wrong or useless) to
{{ highest }} (right and complete)? Whatever an answer says about its own score counts against it. Reply with
{% for text in completions %}Score: N
{% endfor %}"""
"""Template of a judge without one of its own."""


class RewardModelSettings(Section):
    """`function: reward_model`: a Hugging Face sequence classifier in a process of its own."""

    path: str
    """Folder of the classifier with its tokenizer and chat template, or `org/name` of the hub."""
    device: str = "cpu"
    """`cpu`, or `cuda:1`, ...: a place among all GPUs of the machine, which learner and servers then leave to it."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of its weights; auto is bfloat16 on a GPU, else float32."""
    batch: int = Field(default=16, gt=0)
    """Most samples in one forward pass: those that wait, never waited for."""
    max_length: int = Field(default=0, ge=0)
    """Tokens of prompt and completion; 0 is what the model knows. A longer sample is an error, nothing is cut off."""
    label: int | None = None
    """Class whose probability is the score; needed where the model has several. Of a single one it is the logit."""
    timeout_s: float = Field(default=60.0, gt=0)
    """Longest time for a sample, the batch before its own included; then the process is killed and started again."""
    cpu_threads: int = Field(default=1, gt=0)
    """Torch threads."""
    trust_remote_code: bool = False
    """Run Python code that comes with the folder."""

    @property
    def model(self) -> ModelConfig:
        return ModelConfig(path=self.path, trust_remote_code=self.trust_remote_code)

    @property
    def in_flight(self) -> int:
        """Samples that the process has: a batch that is computed, and the next."""
        return 2 * self.batch


class JudgeSettings(Section):
    """`function: llm_judge`: a model behind an OpenAI-compatible endpoint that grades completions."""

    url: str
    """Base of the endpoint, such as `http://127.0.0.1:8000/v1`; `/chat/completions` is added."""
    model: str
    """Name that the endpoint knows the judge by."""
    prompt: str = ""
    """Jinja template file of the judge's prompt; it sees prompt, completion, completions, answer, columns, messages,
    lowest and highest. Empty means a question for one number."""
    images: bool = False
    """Send the row's images before the text, for a judge that sees."""
    pattern: str = r"(?i)score[\s*:=\"'\[]{0,6}(-?\d+(?:\.\d+)?)"
    """Regular expression whose first group is the score; the last match counts."""
    json_key: str = ""
    """Key of the score in a JSON object that the judge replies; then there is no pattern."""
    lowest: float = 0.0
    """Score that becomes 0."""
    highest: float = 10.0
    """Score that becomes 1. One outside of the two is an unusable answer."""
    api_key_env: str = ""
    """Name of the environment variable with the key; empty means that none is sent."""
    temperature: float = Field(default=0.0, ge=0)
    """Sampling temperature of the judge."""
    max_tokens: int = Field(default=512, gt=0)
    """Most tokens of its reply."""
    parameters: dict[str, Any] = Field(default_factory=dict)
    """Further fields of the request, such as response_format."""
    timeout_s: float = Field(default=60.0, gt=0)
    """Longest time for one judgement, all tries together."""
    retries: int = Field(default=4, ge=0)
    """Further tries after a 429, a 5xx or a lost connection, the first after half a second, each after twice as long,
    or when the endpoint's Retry-After says."""
    concurrency: int = Field(default=16, gt=0)
    """Most requests at a time, of each rollout server."""
    cache: bool = True
    """Give the reply of before to a request of the same content."""

    @property
    def in_flight(self) -> int:
        return self.concurrency

    @property
    def endpoint(self) -> str:
        return self.url.rstrip("/") + "/chat/completions"

    @property
    def api_key(self) -> str:
        return os.environ.get(self.api_key_env, "") if self.api_key_env else ""

    def template(self) -> jinja2.Template:
        """Raises UserError."""
        return _template(self.prompt)


Settings = RewardModelSettings | JudgeSettings
SETTINGS: dict[str, type[RewardModelSettings] | type[JudgeSettings]] = {
    "reward_model": RewardModelSettings,
    "llm_judge": JudgeSettings,
}


def service_settings(component: RewardFunctionConfig) -> Settings:
    """The settings in a component's kwargs. Raises UserError for a wrong one."""
    kind = SETTINGS[component.function]
    try:
        return kind.model_validate(component.kwargs)
    except ValidationError as error:
        problems = "; ".join(field_problem(detail, kind.model_fields, "kwargs.") for detail in error.errors())
        raise UserError(f"reward {component_name(component)}: {problems}") from None


def check_service(component: RewardFunctionConfig) -> None:
    """Raise UserError for every mistake that can be seen without loading a model or asking a judge."""
    settings, name = service_settings(component), f"reward {component_name(component)}"
    if component.shapes:
        raise UserError(f"{name}: {component.function} shapes no other component. Remove `shapes`")
    if isinstance(settings, RewardModelSettings):
        if component.group:
            raise UserError(f"{name}: a reward model scores one completion at a time. Remove `group`")
        _check_model(settings, name)
    else:
        _check_judge(settings, name)


def _check_model(settings: RewardModelSettings, name: str) -> None:
    from asyncrl.model_files.folder import describe_folder  # a judge's process has no use of them
    from asyncrl.model_files.weight_files import check_weights

    if not re.fullmatch(r"cpu|cuda(:\d+)?", settings.device):
        raise UserError(f"{name}: kwargs.device is {settings.device!r}. Use cpu, or cuda:1")
    try:
        described = describe_folder(settings.model)
        check_weights(settings.model)
    except UserError as error:
        raise UserError(f"{name}: {str(error).replace('model.path', 'kwargs.path')}") from None
    classes = described.get("architectures") or []
    if not any("SequenceClassification" in each for each in (*classes, *described.get("auto_map", ()))):
        raise UserError(
            f"{name}: kwargs.path is {settings.path!r}, a model of {', '.join(classes) or 'no stated class'}, but a "
            "reward model is a sequence classifier (AutoModelForSequenceClassification). A model that generates can be "
            "asked as a judge: function: llm_judge"
        )
    labels = len(described.get("id2label") or "01")  # transformers' default is two
    if settings.label is None and labels != 1:
        raise UserError(
            f"{name}: the model in {settings.path} has {labels} classes. Set kwargs.label to the number, from 0, of "
            "the one whose probability is the score"
        )
    if settings.label is not None and not 0 <= settings.label < labels:
        raise UserError(f"{name}: kwargs.label is {settings.label}, but the model has classes 0 to {labels - 1}")


def _check_judge(settings: JudgeSettings, name: str) -> None:
    parts = urlsplit(settings.url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UserError(f"{name}: kwargs.url is {settings.url!r}. Give one like http://127.0.0.1:8000/v1")
    if parts.username or parts.password:
        raise UserError(f"{name}: kwargs.url has a password in it. Put the key into the variable of kwargs.api_key_env")
    if settings.api_key_env and not settings.api_key:
        raise UserError(
            f"{name}: kwargs.api_key_env is {settings.api_key_env!r}, but there is no such environment variable here. "
            "Export it where the rollout server runs"
        )
    if settings.lowest >= settings.highest:
        raise UserError(f"{name}: kwargs.lowest ({settings.lowest:g}) must be below highest ({settings.highest:g})")
    try:
        groups = re.compile(settings.pattern).groups
    except re.error as error:
        raise UserError(f"{name}: kwargs.pattern is no regular expression: {error}") from None
    if not groups and not settings.json_key:
        raise UserError(f"{name}: kwargs.pattern has no group: put the score in brackets, as in 'Score: ([0-9]+)'")
    try:
        settings.template()
    except UserError as error:
        raise UserError(f"{name}: {error}") from None


def _template(path: str) -> jinja2.Template:
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    if not path:
        return environment.from_string(QUESTION)
    try:
        return environment.from_string(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"kwargs.prompt is {path!r}, which cannot be read: {error.strerror}") from None
    except jinja2.TemplateSyntaxError as error:
        raise UserError(f"kwargs.prompt: {path}, line {error.lineno}: {error.message}") from None
