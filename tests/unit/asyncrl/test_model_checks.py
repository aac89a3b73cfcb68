"""Parts that do not fit together are refused in seconds: exit code 2, the fix, no run directory, no weights read."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from asyncrl.checks.inputs import check_inputs, check_media, check_rotary
from asyncrl.cli import main as asyncrl
from asyncrl.config.load import dump_config
from asyncrl.config.schema import RunConfig
from asyncrl.data.dataset import open_train
from asyncrl.errors import UserError
from asyncrl.model_files.folder import check_weights, describe_folder, model_folder
from asyncrl.models.loading import load_model
from asyncrl.models.lora import check_adapter, is_adapter_folder
from asyncrl.processing.processor import PromptProcessor

MakeConfig = Callable[..., RunConfig]


def copy_without(model: Path, target: Path, *names: str) -> Path:
    """The folder without its weights and these files."""
    left_out = shutil.ignore_patterns("*.safetensors", *names)
    return Path(shutil.copytree(model, target, ignore=left_out))


def blinded(model: Path, target: Path) -> Path:
    """The folder of a text model."""
    copy_without(model, target, "processor_config.json", "preprocessor_config.json")
    _edit_config(target, lambda described: described.pop("vision_config"))
    return target


def refused(
    command: str, config: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str], *overrides: str
) -> str:
    """The message of a command that changed nothing."""
    file = tmp_path / "run.yaml"
    file.write_text(dump_config(config))
    before = sorted(path.name for path in tmp_path.iterdir())
    assert asyncrl([command, str(file), *overrides]) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    return message


def test_a_model_of_the_hub_is_taken_from_its_cache_and_said_to_be_missing_offline(
    make_config: MakeConfig, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache as `hf download acme/tiny` leaves it; HF_HUB_OFFLINE is on."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    revision = "0123456789abcdef0123456789abcdef01234567"
    stored = tmp_path / "hub" / "models--acme--tiny"
    shutil.copytree(tiny_model, stored / "snapshots" / revision)
    (stored / "refs").mkdir()
    (stored / "refs" / "main").write_text(revision)
    for name in ("acme/tiny", f"acme/tiny@{revision}"):
        config = make_config(model={"path": name})
        assert model_folder(config.model) == stored / "snapshots" / revision
        check_inputs(config, "learner", "rollout_server")
    with pytest.raises(
        UserError, match=r"'acme/other'.*no such folder in .*HF_HUB_OFFLINE forbids downloads: set it to 0"
    ):
        check_inputs(make_config(model={"path": "acme/other"}), "learner")
    with pytest.raises(UserError, match=r"'acme/tiny@v2'.*HF_HUB_OFFLINE"):
        model_folder(make_config(model={"path": "acme/tiny@v2"}).model)


def test_a_model_without_eyes_is_given_no_images(
    make_config: MakeConfig, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(model={"path": str(blinded(tiny_model, tmp_path / "text"))})
    message = refused("train", config, tmp_path, capsys)
    assert "row rl.parquet:0 has images or videos in column 'images'" in message
    assert "has no vision tower (no vision_config in config.json)" in message
    assert "Use a vision-language model, or set data.image_key" in message
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "q", "answer": "a", "images": []}\n{"prompt": "q", "answer": "a"}\n')
    data = make_config(data={"train_files": [str(rows)]}).data
    check_media(config.model, config.data, describe_folder(config.model), open_train(data))


def _edit_config(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    described = json.loads((folder / "config.json").read_text())
    edit(described)
    (folder / "config.json").write_text(json.dumps(described))


QUANTISED = {"quant_method": "awq", "bits": 4}
LACKS: dict[str, tuple[tuple[str, ...], Callable[[dict[str, Any]], object], str]] = {
    "a processor": (
        ("processor_config.json", "preprocessor_config.json"),
        dict,
        "has a vision model but no image processor. Copy preprocessor_config.json",
    ),
    "a tokenizer": (("tokenizer*.json",), dict, "has no tokenizer. Copy tokenizer.json"),
    "a chat template": (("chat_template.*",), dict, "has no chat template"),
    "weights": ((), dict, "has no weights (*.safetensors)"),
    "its own precision": ((), lambda c: c.update(quantization_config=QUANTISED), "are quantised (awq). Use the"),
}


@pytest.mark.parametrize("lacks", LACKS)
def test_what_a_model_folder_lacks_is_named(
    make_config: MakeConfig, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], lacks: str
) -> None:
    left_out, edit, says = LACKS[lacks]
    folder = copy_without(tiny_model, tmp_path / "model", *left_out)
    _edit_config(folder, edit)
    assert says in refused("rollout", make_config(model={"path": str(folder)}), tmp_path, capsys)


def _pointer(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n")


def _sharded(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    names = {"one": "model-00001-of-00002.safetensors", "other": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (
            lambda folder: os.truncate(folder / "model.safetensors", 4),
            "is cut off or damaged: it has 4 bytes",
        ),
        (_pointer, r"is a git-lfs pointer of 64 bytes, not the weights\. Fetch them with `git lfs pull`"),
        (_sharded, r"/model-00002-of-00002\.safetensors is named by .*index\.json and not in the folder\. Download it"),
    ],
)
def test_weights_that_are_not_whole_are_named(
    make_config: MakeConfig,
    tiny_model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[Path], object],
    said: str,
) -> None:
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    check_weights(make_config(model={"path": str(folder)}).model)
    damage(folder)
    config = make_config(model={"path": str(folder)})
    message = refused("learn", config, tmp_path, capsys)
    assert re.search(said, message), message


def test_a_folder_that_may_not_be_read_is_named(
    make_config: MakeConfig, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By root as another user, who may not look into pytest's folder either."""
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    config, user = make_config(model={"path": str(folder)}), os.geteuid()
    folder.chmod(0)
    try:
        os.seteuid(user or 65534)
        with pytest.raises(UserError, match=r"model\.path is '.*/model': Permission denied\. Make .* readable"):
            model_folder(config.model)
        assert not is_adapter_folder(folder)
    finally:
        os.seteuid(user)
        folder.chmod(0o700)
    long = make_config(model={"path": "m" * 300})
    assert "': File name too long. Make " in refused("train", long, tmp_path, capsys)


def _link_to_nothing(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("../blobs/gone")


def _without_a_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors[min(name for name in tensors if "mlp" in name)]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


FILLED = r"do not fill the model of its config\.json: {} parameters .* such as model\..*mlp.*, and would be random"


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_link_to_nothing, r"/model\.safetensors is a link to nothing\. Download it"),
        (_without_a_tensor, FILLED.format(1)),
        (
            lambda folder: _edit_config(folder, lambda c: c["text_config"].update(intermediate_size=64)),
            FILLED.format(6),
        ),
        (
            lambda folder: _edit_config(folder, lambda c: c.update(model_type="new")),
            r"model_type is 'new' \(.*trust_rem",
        ),
    ],
)
def test_a_model_is_loaded_whole_or_not_at_all(
    make_config: MakeConfig, tiny_model: Path, tmp_path: Path, damage: Callable[[Path], object], said: str
) -> None:
    """Whoever loads it: services, `sft`, `eval`, an export."""
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    damage(folder)
    with pytest.raises(UserError, match=said):
        load_model(make_config(model={"path": str(folder)}).model, device=torch.device("cpu"))


def test_weights_and_adapters_that_cannot_be_read_are_named(
    make_config: MakeConfig, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(model={"path": str(tiny_model)}).model
    (tmp_path / "adapter_model.safetensors").write_bytes(b"1234")
    with pytest.raises(UserError, match=r"adapter_model\.safetensors is cut off or damaged: it has 4 bytes"):
        check_adapter(config, tmp_path)
    (tmp_path / "adapter_model.safetensors").unlink()
    with pytest.raises(UserError, match=r"cannot read .*adapter_model\.safetensors: No such file"):
        check_adapter(config, tmp_path)

    def denied(*_: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "open", denied)
    with pytest.raises(UserError, match=r"cannot read .*/model\.safetensors: Permission denied\. Make it readable"):
        check_weights(config)


def test_a_processor_that_cannot_be_loaded_is_named(make_config: MakeConfig, tiny_model: Path, tmp_path: Path) -> None:
    folder = copy_without(tiny_model, tmp_path / "model")
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(
        UserError, match=r"the processor in .*model cannot be loaded \(KeyError: .*\). Copy tokenizer\*, processor_"
    ):
        PromptProcessor(make_config(model={"path": str(folder)}).model)


Sections = dict[str, dict[str, Any]]

NO_ENGINE_CAN: dict[str, tuple[Sections, str]] = {
    "several devices for an engine of one": (
        {"rollout": {"tensor_parallel_size": 2}},
        "rollout.tensor_parallel_size is 2, but the hf engine runs on one device. Set .*rollout.tensor_parallel_size=1",
    ),
    "arguments that hf does not take": (
        {"rollout": {"engine_args": {"max_num_seqs": 4}}},
        r"rollout.engine is hf and rollout.engine_args is .*max_num_seqs.*takes no arguments. Set rollout.engine_args=",
    ),
    "no device": ({"learner": {"device": "gpu"}}, "learner.device is 'gpu', not a device name. Set .*=auto, cpu"),
}


@pytest.mark.parametrize("name", NO_ENGINE_CAN)
def test_what_the_engine_cannot_do_anywhere_is_refused_with_the_configuration(
    make_config: MakeConfig, name: str
) -> None:
    sections, expected = NO_ENGINE_CAN[name]
    with pytest.raises(ValueError, match=expected):
        make_config(**sections)


NOT_HERE: dict[str, tuple[Sections, str]] = {
    "longer than the model knows": (
        {"data": {"max_response_length": 4000}, "batch": {"tokens_per_microbatch": 8192}},
        r"one sample may have 4128 tokens .* knows 2048 positions \(max_position_embeddings\). Lower",
    ),
    "a device that is not there": ({"rollout": {"device": "cuda"}}, "rollout.device is cuda, but torch .* sees no"),
}


@pytest.mark.parametrize("name", NOT_HERE)
def test_what_the_engine_cannot_do_here_is_refused(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    sections, expected = NOT_HERE[name]
    with pytest.raises(UserError, match=expected):
        check_inputs(make_config(**sections), "rollout_server")


def test_each_side_checks_its_own_device(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may start on two machines."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    config = make_config(learner={"device": "cuda:1"}, rollout={"device": "cpu"})
    check_inputs(config, "rollout_server")
    with pytest.raises(UserError, match=r"learner.device is cuda:1, but torch .* Set learner.device=cpu or auto"):
        check_inputs(config, "learner")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(UserError, match=r"learner.device is cuda:1, but this machine has 1 CUDA device\(s\)"):
        check_inputs(config, "learner")


# --- devices of a sync run ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("learner", "rollout", "with_cuda", "without"),
    [
        ("auto", "auto", True, True),
        ("cuda", "cuda:0", True, True),
        ("cpu", "auto", False, True),
        ("cuda:0", "cuda:1", False, False),
        ("cpu", "cuda", False, False),
    ],
)
def test_devices_are_compared_by_what_they_mean(
    make_config: MakeConfig, learner: str, rollout: str, with_cuda: bool, without: bool
) -> None:
    config = make_config(learner={"device": learner}, rollout={"device": rollout})
    assert config.on_one_device(cuda=True) == with_cuda
    assert config.on_one_device(cuda=False) == without, "who names a CUDA device means a machine that has one"


def test_whether_auto_is_the_other_sides_device_is_seen_where_they_start(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(trainer={"mode": "sync"}, learner={"device": "cpu"})
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    check_inputs(config, "learner", "rollout_server")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(UserError, match=r"learner.device is cpu and rollout.device is auto: sync mode needs one"):
        check_inputs(config, "learner", "rollout_server")


PHI3 = {"original_max_position_embeddings": 64, "max_position_embeddings": 4096}
LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": 64}
CHANGING: dict[str, dict[str, Any]] = {
    "longrope": {"rope_parameters": LONGROPE},
    "longrope of a layer's type": {"rope_parameters": {"full_attention": LONGROPE, "sliding_attention": {}}},
    "su, as Phi 3 was published": {"rope_scaling": {"type": "su"}, **PHI3},
    "dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": 64},
    "of a language model's part": {"text_config": {"rope_parameters": LONGROPE}},
}


@pytest.mark.parametrize("kind", CHANGING)
def test_rows_that_would_change_each_others_rotary_frequencies_are_refused(make_config: MakeConfig, kind: str) -> None:
    model = make_config().model
    check_rotary(64, model, CHANGING[kind])
    with pytest.raises(UserError, match=r"65 tokens .* others in rows of more than 64: .*Lower both to 64"):
        check_rotary(65, model, CHANGING[kind])


def test_rotary_frequencies_that_never_change_are_no_obstacle(make_config: MakeConfig) -> None:
    for kind in ("default", "linear", "yarn", "llama3"):
        parameters = {"rope_type": kind, "original_max_position_embeddings": 4}
        check_rotary(65, make_config().model, {"rope_parameters": parameters, "max_position_embeddings": 4})
