"""The fingerprint of processor, tokenizer and template: whatever changes what the model sees changes it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.schema import RunConfig
from asyncrl.processing.processor import PromptProcessor
from protocol.errors import ErrorCode
from protocol.handshake import check_hello
from tests.rigs.alignment_rig import pair_config
from tests.rigs.fuzz import content

__all__ = ["pair_config"]


PROCESSOR_CHANGES: dict[str, Any] = {
    "size": {"shortest_edge": 784, "longest_edge": 50_000},
    "patch_size": 14,
    "merge_size": 1,
    "temporal_patch_size": 1,
    "resample": 2,
    "rescale_factor": 1 / 127,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "do_rescale": False,
    "do_normalize": False,
    "do_resize": False,
    "do_convert_rgb": False,
}


def refuses(mine: PromptProcessor, theirs: PromptProcessor) -> bool:
    """The learner refuses a server with that processor."""
    hello = content.hello("s").model_copy(update={"processor_fingerprint": theirs.fingerprint})
    refusal = check_hello(
        hello, model_fingerprint=content.MODEL, processor_fingerprint=mine.fingerprint, live_server_ids={}
    )
    assert refusal is None or refusal.code is ErrorCode.PROCESSOR_MISMATCH
    return refusal is not None


@pytest.mark.parametrize("part", ["image_processor", "video_processor"])
def test_every_processor_setting_is_in_the_fingerprint(pair_config: RunConfig, part: str) -> None:
    mine, theirs = PromptProcessor(pair_config.model), PromptProcessor(pair_config.model)
    changed = getattr(theirs.processor, part)
    for setting, value in PROCESSOR_CHANGES.items():
        before = getattr(changed, setting)
        assert before != value
        assert not refuses(mine, theirs)
        setattr(changed, setting, value)
        assert refuses(mine, theirs), setting
        setattr(changed, setting, before)


def with_another_token(text: str) -> str:
    tokenizer = json.loads(text)
    number = max(*tokenizer["model"]["vocab"].values(), *(token["id"] for token in tokenizer["added_tokens"])) + 1
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][-1], "id": number, "content": "<|new|>"})
    return json.dumps(tokenizer)


FOLDER_CHANGES: list[tuple[str, Callable[[str], str]]] = [
    ("chat_template.jinja", lambda text: text + " "),
    ("tokenizer.json", with_another_token),
    ("tokenizer.json", lambda text: json.dumps(json.loads(text) | {"normalizer": {"type": "Lowercase"}})),
    ("tokenizer_config.json", lambda text: json.dumps(json.loads(text) | {"pad_token": "<|vision_pad|>"})),
]


def test_tokenizer_and_template_are_in_the_fingerprint(pair_config: RunConfig, tmp_path: Path) -> None:
    mine = PromptProcessor(pair_config.model)
    other = pair_config.model.model_copy(update={"path": str(tmp_path / "other")})
    shutil.copytree(pair_config.model.path, other.path)
    assert not refuses(mine, PromptProcessor(other)), "the folder's own name does not matter"
    for name, change in FOLDER_CHANGES:
        file = Path(other.path, name)
        before = file.read_text()
        file.write_text(change(before))
        assert refuses(mine, PromptProcessor(other)), name
        file.write_text(before)


def test_another_limit_of_pixels_is_refused_by_name(pair_config: RunConfig) -> None:
    limited = PromptProcessor(pair_config.model.model_copy(update={"max_pixels": 1600}))
    mine = PromptProcessor(pair_config.model)
    hello = content.hello("s").model_copy(update={"processor_fingerprint": limited.fingerprint})
    refusal = check_hello(
        hello, model_fingerprint=content.MODEL, processor_fingerprint=mine.fingerprint, live_server_ids={}
    )
    assert refusal is not None
    assert f"fingerprint {limited.fingerprint}, the learner's is {mine.fingerprint}: " in refusal.reason
    assert limited.fingerprint.endswith(" model.max_pixels=1600")
    assert "model.max_pixels" in refusal.fix
