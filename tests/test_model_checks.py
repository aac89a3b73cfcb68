"""What does not fit together is refused in seconds: exit code 2, the fix, no run directory, no weights read."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.cli import main as asyncrl
from asyncrl.config.load import dump_config
from asyncrl.config.schema import RunConfig
from asyncrl.data.dataset import open_train
from asyncrl.errors import UserError
from asyncrl.launch.model_checks import check_engine, check_images, check_model_folder

MakeConfig = Callable[..., RunConfig]


def copy_without(model: Path, target: Path, *names: str) -> Path:
    """The folder without its weights and these files."""
    left_out = shutil.ignore_patterns("*.safetensors", *names)
    return Path(shutil.copytree(model, target, ignore=left_out))


def blinded(model: Path, target: Path) -> Path:
    """The folder of a text model."""
    copy_without(model, target, "processor_config.json", "preprocessor_config.json")
    described = json.loads((target / "config.json").read_text())
    described.pop("vision_config")
    (target / "config.json").write_text(json.dumps(described))
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


def test_a_model_without_eyes_is_given_no_images(
    make_config: MakeConfig, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(model={"path": str(blinded(tiny_model, tmp_path / "text"))})
    message = refused("train", config, tmp_path, capsys)
    assert "row rl.parquet:0 has images in column 'images'" in message
    assert "has no vision tower (no vision_config in config.json)" in message
    assert "Use a vision-language model, or set data.image_key" in message
    assert "no vision tower" in refused("sft", config, tmp_path, capsys, "data.target_key=answer")


def test_a_text_model_takes_rows_without_images(make_config: MakeConfig, tiny_model: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "q", "answer": "a", "images": []}\n{"prompt": "q", "answer": "a"}\n')
    text = blinded(tiny_model, tmp_path / "text")
    config = make_config(model={"path": str(text)}, data={"train_files": [str(rows)]})
    check_images(config, check_model_folder(config), open_train(config.data), None)
    rows.write_text('{"prompt": "q", "answer": "a"}\n{"prompt": "q", "answer": "a", "images": ["late.png"]}\n')
    with pytest.raises(UserError, match=r"row rows.jsonl:1 has images"):
        check_images(config, check_model_folder(config), open_train(config.data), None)


@pytest.mark.parametrize("command", ["train", "rollout", "learn"])
def test_a_missing_processor_is_named(
    make_config: MakeConfig, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    folder = copy_without(tiny_model, tmp_path / "model", "processor_config.json", "preprocessor_config.json")
    message = refused(command, make_config(model={"path": str(folder)}), tmp_path, capsys)
    assert "has a vision model but no image processor. Copy preprocessor_config.json" in message


@pytest.mark.parametrize("command", ["train", "rollout", "learn"])
def test_a_missing_tokenizer_is_named(
    make_config: MakeConfig, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    folder = copy_without(tiny_model, tmp_path / "model", "tokenizer*.json")
    message = refused(command, make_config(model={"path": str(folder)}), tmp_path, capsys)
    assert "has no tokenizer. Copy tokenizer.json" in message


def test_an_adapter_alone_is_no_model(
    make_config: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    message = refused("train", make_config(model={"path": str(tmp_path / "adapter")}), tmp_path, capsys)
    assert "a folder with an adapter only. Name its base model, or merge the two" in message


def test_a_damaged_description_is_named(
    make_config: MakeConfig, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copy_without(tiny_model, tmp_path / "model")
    (folder / "config.json").write_text('{"model_type": "qwen2_vl", ')
    message = refused("train", make_config(model={"path": str(folder)}), tmp_path, capsys)
    assert "cannot read" in message
    assert "config.json" in message


BAD_SETTINGS: dict[str, tuple[dict[str, dict[str, Any]], str]] = {
    "more devices than there are": (
        {"rollout": {"engine": "vllm", "device": "cpu", "tensor_parallel_size": 64}},
        r"rollout.tensor_parallel_size is 64, but this machine has 1 device \(its CPU\). Set .*=1, or start",
    ),
    "several devices for an engine of one": (
        {"rollout": {"tensor_parallel_size": 2}},
        "rollout.tensor_parallel_size is 2, but the hf engine runs on one device. Set rollout.engine=vllm",
    ),
    "too cold": (
        {"rollout": {"engine": "vllm", "temperature": 0.001}},
        "rollout.temperature is 0.001, but vllm samples at 0.01 instead",
    ),
    "too cold held-out rows": (
        {"rollout": {"engine": "vllm"}, "evaluation": {"temperature": 0.005}},
        "evaluation.temperature is 0.005, but vllm .* or 0 for greedy",
    ),
    "log-probs that hf does not have": (
        {"rollout": {"logprobs": "raw"}},
        "rollout.logprobs is raw, but the hf engine returns .* Set rollout.logprobs=processed or rollout.engine=vllm",
    ),
    "arguments that hf does not take": (
        {"rollout": {"engine_args": {"max_num_seqs": 4}}},
        r"rollout.engine_args has \['max_num_seqs'\], but the hf engine takes no arguments",
    ),
    "longer than the model knows": (
        {"data": {"max_response_length": 4000}, "batch": {"tokens_per_microbatch": 8192}},
        r"one sample may have 4128 tokens .* knows 2048 positions \(max_position_embeddings\). Lower",
    ),
}


@pytest.mark.parametrize("name", BAD_SETTINGS)
def test_what_the_engine_cannot_do_is_refused(make_config: MakeConfig, name: str) -> None:
    sections, expected = BAD_SETTINGS[name]
    config = make_config(**sections)
    with pytest.raises(UserError, match=expected):
        check_engine(config, check_model_folder(config))


@pytest.mark.parametrize("command", ["train", "rollout"])
def test_both_commands_refuse_it(
    make_config: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert "runs on one device" in refused(command, make_config(rollout={"tensor_parallel_size": 2}), tmp_path, capsys)


def test_more_devices_than_gpus(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    config = make_config(rollout={"engine": "vllm", "tensor_parallel_size": 4})
    with pytest.raises(UserError, match=r"this machine has 2 CUDA device\(s\). Set rollout.tensor_parallel_size=2"):
        check_engine(config, check_model_folder(config))


@pytest.mark.slow
def test_it_takes_seconds_and_no_torch(make_config: MakeConfig, tiny_model: Path, tmp_path: Path) -> None:
    config = make_config(model={"path": str(copy_without(tiny_model, tmp_path / "m", "processor_config.json"))})
    file = tmp_path / "run.yaml"
    file.write_text(dump_config(config))
    started = time.monotonic()
    script = (
        "import sys; from asyncrl.cli import main; code = main(['train', sys.argv[1]]); print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"{script}; sys.exit(code)", str(file)], capture_output=True, text=True
    )
    assert done.returncode == 2, done.stderr
    assert done.stdout.strip() == "False"
    assert time.monotonic() - started < 20
