"""Teachers of a run: by a column of the rows, and after a prompt that the student does not see."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.explain import method_line
from asyncrl.config.schema import RunConfig
from asyncrl.errors import UserError
from asyncrl.memory_plan.rehearsal import rehearse
from asyncrl.models.loading import load_model
from asyncrl.processing.processor import PromptProcessor
from asyncrl_plugins.distillation.hook import Distillation
from asyncrl_plugins.distillation.rows import Hint, hinted, text_of
from learner.tickets.ticket_writer import TicketWriter
from learner.training.batch import Batch
from learner.training.engine import TorchEngine
from learner.training.packing import TrainGroup
from learner.training.reference import Reference
from learner.training.roles import Roles, Scored
from learner.training.step import LearnerStep
from protocol.messages import ChatMessage, ImagePart, Prompt, TextPart
from tests.plugins.distillation.test_gkd import roles_of
from tests.rigs.made_up_batch import made_up_batch
from tests.rigs.tiny import make_tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")
MakeConfig = Callable[..., RunConfig]
HINT = {"privileged": "Hint: {answer} of {digits}", "privileged_tokens": 64}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two wider models than the student, of random weights."""
    folder = tmp_path_factory.mktemp("teachers")
    made = {name: make_tiny_model(folder / name, intermediate=size) for name, size in (("read", 192), ("rest", 256))}
    return {name: str(path) for name, path in made.items()}


def configured(make_config: MakeConfig, *, reference: str = "", **sections: Any) -> RunConfig:
    """Of gkd, with the given section of teachers."""
    algorithm = {"adv_estimator": "gkd", "gkd": {"top_k": 5}, "distillation": sections.pop("distillation", {})}
    return make_config(algorithm=algorithm, reference={"path": reference}, **sections)


def hook_of(step: LearnerStep) -> Distillation:
    (hook,) = step.objective.scoring
    assert isinstance(hook, Distillation)
    return hook


def logprobs(engine: TorchEngine, groups: tuple[TrainGroup, ...], batch: Batch) -> torch.Tensor:
    """[N] of a batch's trained tokens by a model, 0 where the groups have none of them."""
    found = torch.zeros(len(batch.trained.row))
    packed = engine.pack(groups)
    with torch.no_grad():
        found[batch.places(packed.row, packed.column)] = engine.forward(packed).logprobs
    return found


@pytest.mark.parametrize("budget", [512, 4096])
def test_each_row_is_scored_by_the_teacher_of_its_column(
    make_config: MakeConfig, folders: dict[str, str], budget: int
) -> None:
    """One of them is the reference policy, and the other is loaded beside it: of one folder there is one model."""
    named = {"sum": folders["read"], "product": folders["read"], "default": folders["rest"]}
    chosen = {"teachers": named, "teacher_key": "kind"}
    config = configured(make_config, reference=folders["rest"], distillation=chosen)
    assert [setting for setting, _ in config.other_models] == ["reference.path", "algorithm.distillation.teachers.sum"]
    roles = roles_of(config)
    step = LearnerStep(roles, config.step_settings)
    (companion,) = roles.actor.companions
    assert isinstance(companion, Reference)
    assert companion.settings.model.path == folders["read"]
    assert roles.own_reference is not None
    batch = made_up_batch(config, PromptProcessor(config.model))
    kinds = [item.ticket.prompt.columns["kind"] for item in batch.received]
    assert {"sum", "difference"} <= {*kinds}, "rows of both teachers"
    scored = hook_of(step).score(batch, Scored(), budget)
    expected = torch.zeros(len(batch.trained.row))
    for number, group in enumerate(batch.train_groups):
        engine = companion if kinds[number] in ("sum", "product") else roles.own_reference
        expected += logprobs(engine, (group,), batch)
    assert scored.reference_logprobs is not None
    torch.testing.assert_close(scored.reference_logprobs, expected, atol=1e-5, rtol=1e-5)
    metrics = step(batch, 2)
    shares = [metrics[f"teacher/share/{name}"] for name in named]
    assert [share > 0 for share in shares] == ["sum" in kinds, "product" in kinds, True]
    assert sum(shares) == pytest.approx(1.0)


def test_the_teacher_sees_the_hint_and_the_images_and_scores_the_same_tokens(
    make_config: MakeConfig, folders: dict[str, str]
) -> None:
    config = configured(make_config, reference=folders["rest"], distillation=HINT)
    roles = roles_of(config)
    processor = PromptProcessor(config.model)
    batch = made_up_batch(config, processor)
    groups = []
    for group, item in zip(batch.train_groups, batch.received, strict=True):
        prompt, columns = item.ticket.prompt, item.ticket.prompt.columns
        (message,) = prompt.messages
        *before, last = message.content
        assert isinstance(last, TextPart)
        text = f"{last.text}\n\nHint: {prompt.answer} of {columns['digits']}"
        message = message.model_copy(update={"content": (*before, TextPart(text=text))})
        encoded = processor.encode(prompt.model_copy(update={"messages": (message,)}), item.blobs)
        assert len(encoded.token_ids) > len(group.prompt.token_ids)
        assert encoded.image_hashes == group.prompt.image_hashes
        groups.append(TrainGroup(encoded, group.completions))
    assert roles.own_reference is not None
    expected = logprobs(roles.own_reference, tuple(groups), batch)
    scored = hook_of(LearnerStep(roles, config.step_settings)).score(batch, Scored(), 4096)
    assert scored.reference_logprobs is not None
    torch.testing.assert_close(scored.reference_logprobs, expected, atol=1e-5, rtol=1e-5)
    plain = logprobs(roles.own_reference, batch.train_groups, batch)
    assert (expected - plain).abs().max() > 1e-3, "the hint changes what the teacher thinks"


def test_a_teacher_of_a_padded_vocabulary_says_of_its_own_tokens_that_they_are_others(
    make_config: MakeConfig, folders: dict[str, str], tmp_path: Path
) -> None:
    """As large models of a family have more rows of the output layer than small ones, for tokens that nobody says."""
    padded = tmp_path / "padded"
    shutil.copytree(folders["rest"], padded)
    model: Any = load_model(make_config().model.model_copy(update={"path": str(padded)}), device=torch.device("cpu"))
    rows = model.get_output_embeddings().weight.shape[0]
    model.resize_token_embeddings(rows + 9)
    with torch.no_grad():
        model.get_output_embeddings().weight[rows:] = model.get_output_embeddings().weight[:9]
    model.save_pretrained(padded)
    config = configured(make_config, reference=str(padded))
    roles = roles_of(config)
    step = LearnerStep(roles, config.step_settings)
    batch = made_up_batch(config, PromptProcessor(config.model))
    metrics = step(batch, 2)
    said = hook_of(step)._said
    assert roles.own_reference is not None
    assert roles.own_reference.facts.vocabulary == rows + 9
    assert int(said.ids.max()) < rows
    torch.testing.assert_close(said.classes.exp().sum(-1), torch.ones(len(said.classes)), atol=1e-5, rtol=0)
    assert metrics["teacher/divergence"] > 0


def test_the_line_of_a_run_names_a_method_of_two_kinds_once() -> None:
    algorithm = {"adv_estimator": "gkd", "gkd": {"beta": 0.1}, "distillation": {"privileged": "Think"}}
    line = method_line(AlgorithmConfig.model_validate(algorithm))
    assert line.endswith("token_tis, with distillation, gkd.beta 0.1, distillation.privileged Think")


def test_the_memory_plan_has_every_teacher_once_and_no_second_pass(
    make_config: MakeConfig, folders: dict[str, str]
) -> None:
    named = {"sum": folders["read"], "product": folders["read"], "default": folders["rest"]}
    chosen = {"teachers": named, "teacher_key": "kind"}
    rewards = rehearse(make_config())
    one = rehearse(configured(make_config, reference=folders["rest"]))
    two = rehearse(configured(make_config, reference=folders["rest"], distillation=chosen))
    other = rehearse(configured(make_config, reference=folders["read"]))
    assert two.reference == one.reference + other.reference > 0
    assert two.passing == one.passing == rewards.passing


@pytest.mark.parametrize("estimator", ["opd", "gkd"])
@pytest.mark.parametrize("model", [{}, {"lora": {"rank": 4}}], ids=str)
def test_a_student_learns_from_itself_with_a_hint(
    make_config: MakeConfig, estimator: str, model: dict[str, Any]
) -> None:
    """The teacher is the model as it began: a frozen copy, or the same weights with the adapter off."""
    config = make_config(
        model=model,
        algorithm={"adv_estimator": estimator, "distillation": HINT},
        learner={"optim": {"lr": 3e-3 if model else 1e-4, "weight_decay": 0.0}},
    )
    assert (config.reference_model is None) == bool(model)
    roles = roles_of(config)
    step = LearnerStep(roles, config.step_settings)
    batch = made_up_batch(config, PromptProcessor(config.model))
    before = hook_of(step).score(batch, Scored(), 4096).reference_logprobs
    metrics = [step(batch, version) for version in range(2, 8)]
    after = hook_of(step).score(batch, Scored(), 4096).reference_logprobs
    assert before is not None
    assert after is not None
    torch.testing.assert_close(after, before, atol=1e-6, rtol=0)
    if estimator == "gkd":
        distances = [each["teacher/divergence"] for each in metrics]
        assert 0 < distances[-1] < 0.5 * distances[0]
    else:
        assert metrics[0]["reference_kl"] != 0
        assert metrics[0]["grad_norm"] > 0


ROWS: list[dict[str, Any]] = [
    {"prompt": "a", "answer": "1", "subject": "maths", "hint": "count"},
    {"prompt": "b", "answer": "2", "subject": "art", "hint": None},
    {"prompt": "c", "answer": "3", "subject": "maths", "hint": "<|im_end|>"},
    {"prompt": "d", "answer": "4", "subject": None, "hint": "long " * 30},
    {"prompt": "e", "answer": "5", "subject": "maths", "hint": "colour"},
]


@pytest.mark.parametrize(
    ("settings", "bad"),
    [
        (
            {"teachers": {"maths": "A"}, "teacher_key": "subject"},
            {
                1: "'art' in column 'subject' (algorithm.distillation.teacher_key) is no teacher. Teachers are maths",
                3: "'' in column 'subject'",
            },
        ),
        ({"teachers": {"maths": "A", "default": "B"}, "teacher_key": "subject"}, {}),
        (
            {"privileged": "Think of {hint}", "privileged_tokens": 60},
            {1: "there is no text in column 'hint'", 2: "'<|im_end|>'", 3: "tokens, over privileged_tokens = 60"},
        ),
        ({"privileged": "The answer is {answer}"}, {}),
        ({"privileged": "Think"}, {}),
    ],
    ids=str,
)
def test_rows_that_no_teacher_can_score_are_bad_rows(
    make_config: MakeConfig, folders: dict[str, str], tmp_path: Path, settings: dict[str, Any], bad: dict[int, str]
) -> None:
    """They are left out and counted, or refused by name (data.on_bad_row)."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    data = {"train_files": [str(tmp_path / "rows.jsonl")], "val_files": []}
    paths = {"A": folders["read"], "B": folders["rest"]}
    teachers = {name: paths[folder] for name, folder in settings.get("teachers", {}).items()}
    section = settings | ({"teachers": teachers} if teachers else {})

    def writer(**more: str) -> TicketWriter:
        config = configured(make_config, reference=folders["read"], distillation=section, data=data | more)
        return TicketWriter(config.ticket_settings, PromptProcessor(config.model), (1,))

    found = writer()
    assert found.num_train_rows == len(ROWS) - len(bad)
    assert [row.row_id for row in found.bad_rows] == [f"rows.jsonl:{number}" for number in bad]
    assert all(f"row rows.jsonl:{n}: " in row.reason for n, row in zip(bad, found.bad_rows, strict=True))
    for row, reason in zip(found.bad_rows, bad.values(), strict=True):
        assert reason in row.reason
    if bad:
        with pytest.raises(UserError, match=re.escape(f"{len(bad)} of 5 training rows cannot be used")):
            writer(on_bad_row="stop")


def test_a_teacher_of_no_row_and_a_column_of_no_row_are_refused(
    make_config: MakeConfig, folders: dict[str, str]
) -> None:
    def begin(**settings: Any) -> None:
        config = configured(make_config, reference=folders["read"], distillation=settings)
        TicketWriter(config.ticket_settings, PromptProcessor(config.model), (1,))

    named = {"raed": folders["read"], "default": folders["rest"]}
    with pytest.raises(UserError, match=r"teachers has raed \(.*no usable row has that value in the column 'kind'"):
        begin(teachers=named, teacher_key="kind")
    with pytest.raises(UserError, match=r"names the column 'kinds'.* Did you mean 'kind'\?"):
        begin(teachers=named, teacher_key="kinds")
    with pytest.raises(UserError, match="names the column 'prompt'"):
        begin(privileged="Again: {prompt}")


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"distillation": {"teachers": {"read": "A"}}}, "Set both, or leave both out"),
        ({"distillation": {"teachers": {"read": "A", "default": "B"}, "teacher_key": "kind"}}, "reference.path=B"),
        ({"distillation": {"privileged": "Hint: {}"}}, r"Write \{answer\}"),
        ({"distillation": {"privileged": "Hint: {answer"}}, "Write columns as"),
        ({"distillation": HINT | {"privileged_tokens": 4000}}, "knows 2048 positions"),
        ({"distillation": HINT, "adv_estimator": "grpo"}, "asks no teacher. Choose opd or gkd"),
        ({"distillation": {}}, "the student would be its own teacher. Set reference.path"),
    ],
    ids=lambda value: None if isinstance(value, dict) else value,
)
def test_what_does_not_go_together_is_refused(make_config: MakeConfig, sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        make_config(algorithm={"adv_estimator": "gkd", **sections})


def test_each_teachers_tokenizer_is_the_students(
    make_config: MakeConfig, folders: dict[str, str], tmp_path: Path
) -> None:
    shutil.copytree(folders["rest"], tmp_path / "other")
    file = tmp_path / "other" / "tokenizer.json"
    told = json.loads(file.read_text())
    told["added_tokens"][0]["content"] = "<|another|>"
    file.write_text(json.dumps(told))
    named = {"read": folders["read"], "default": str(tmp_path / "other")}
    with pytest.raises(ValidationError, match=r"teachers.default '.*other' has other ids"):
        configured(make_config, reference=folders["read"], distillation={"teachers": named, "teacher_key": "kind"})


def test_a_reference_that_follows_the_student_may_teach_with_a_hint(make_config: MakeConfig) -> None:
    make_config(algorithm={"adv_estimator": "gkd", "distillation": HINT}, reference={"ema": 0.9})
    with pytest.raises(ValidationError, match="the reference moves"):
        make_config(algorithm={"adv_estimator": "gkd"}, reference={"ema": 0.9, "path": "elsewhere"})


def test_columns_become_text() -> None:
    assert [text_of(value) for value in ("  a b ", 3, 2.5, True)] == ["a b", "3", "2.5", "True"]
    assert {text_of(value) for value in (None, "", " ", float("nan"), [1], {"a": 1}, b"x")} == {""}
    assert Hint("{{x}} {a} and {b c}").of({"a": 1, "b c": "two"}) == "{x} 1 and two"


def test_a_hint_stands_behind_the_last_users_message() -> None:
    image = ChatMessage(role="user", content=(TextPart(text="look"), ImagePart()))
    answer = ChatMessage(role="assistant", content=(TextPart(text="well"),))
    prompt = Prompt(row_id="r", messages=(image, answer), image_hashes=("0" * 64,))
    found = hinted(prompt, "there")
    assert found.messages[0].content == (TextPart(text="look"), ImagePart(), TextPart(text="there"))
    assert found.messages[1:] == (answer,)
    assert found.image_hashes == prompt.image_hashes


def test_roles_without_teachers_load_none(make_config: MakeConfig) -> None:
    config = make_config()
    roles = Roles(roles_of(config).actor)
    assert LearnerStep(roles, config.step_settings).objective.scoring == []
    assert roles.actor.companions == ()
