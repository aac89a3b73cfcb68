"""A chat template that writes today's date writes one day in all prompts of a run, whatever a clock says."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from asyncrl.config.schema import RunConfig
from asyncrl.config.sections import ModelConfig
from asyncrl.demo.model import CHAT_TEMPLATE
from asyncrl.processing.chat_template import ChatTemplate
from asyncrl.processing.processor import PromptProcessor
from learner.loop.resume import settle_day
from tests.rigs import chat_templates as templates
from tests.rigs.chat_templates import make_text_model

MESSAGES = [{"role": "user", "content": [{"type": "text", "text": "7"}]}]
CLOCKS = (
    (templates.LLAMA, "Today Date: 29 Feb 2024"),
    (templates.GPT_OSS, "Current date: 2024-02-29"),
    ("{{ strftime_now('%A, %B %d, %H:%M:%S') }}" + templates.CHATML, "Thursday, February 29, 00:00:00"),
)


@pytest.mark.parametrize(("template", "written"), CLOCKS)
def test_the_configured_day_is_today(tmp_path: Path, template: str, written: str) -> None:
    config = make_text_model(tmp_path, template, "<|end|>")
    processor = PromptProcessor(config.model_copy(update={"template_date": "2024-02-29"}))
    assert processor.template.writes_date
    assert written in processor.render_messages(MESSAGES)
    assert processor.fingerprint == PromptProcessor(config).fingerprint, "servers elsewhere are on another day"


def test_processors_of_images_write_it_too(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.processing_utils.logger.warning", pytest.fail)
    shutil.copytree(tiny_model, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ strftime_now('%d.%m.') }}" + CHAT_TEMPLATE)
    processor = PromptProcessor(ModelConfig(path=str(tmp_path / "model"), template_date="2024-02-29"))
    assert processor.render_messages(MESSAGES).startswith("29.02.<|im_start|>")
    assert not PromptProcessor(ModelConfig(path=str(tiny_model))).template.writes_date


@pytest.mark.parametrize("day", ["today", "2026-02-30", "28 Nov 2026"])
def test_what_is_no_day_is_refused(day: str) -> None:
    with pytest.raises(ValidationError, match="is no day: expected YYYY-MM-DD"):
        ModelConfig(path="p", template_date=day)


class _Recorded:
    def __init__(self, settings: dict[str, Any]):
        self._settings = json.dumps(settings)

    def meta(self, name: str) -> str | None:
        return self._settings if name == "settings" else None


def test_a_run_keeps_its_day(make_config: Callable[..., RunConfig], tmp_path: Path) -> None:
    """The configured one, else the one that was recorded, else today; none where the template writes no date."""
    model = make_text_model(tmp_path / "llama", templates.LLAMA, "<|eot_id|>")
    config, recorded = make_config(model={"path": model.path}), _Recorded({"model.template_date": "2024-02-29"})

    def day(journal: Any, **changes: str) -> str:
        changed = make_config(model={"path": model.path, **changes})
        processor = PromptProcessor(changed.model)
        assert settle_day(changed.model, processor, journal) == {"model.template_date": processor.template.day}
        return processor.template.day

    assert day(recorded) == "2024-02-29"
    assert day(recorded, template_date="2020-01-01") == "2020-01-01", "which --resume refuses"
    assert day(None) == day(_Recorded({})) == ChatTemplate(PromptProcessor(config.model).processor).day
    plain = make_text_model(tmp_path / "plain", templates.CHATML, "<|im_end|>")
    assert settle_day(plain, PromptProcessor(plain)) == {}


def test_processors_of_images_take_settings(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.processing_utils.logger.warning", pytest.fail)
    shutil.copytree(tiny_model, tmp_path / "model")
    clock = "{{ strftime_now('%d.%m.') }}"
    for before in ("", clock):
        template = before + "{% if thinks is false %}off{% endif %}" + CHAT_TEMPLATE
        (tmp_path / "model" / "chat_template.jinja").write_text(template)
        model = ModelConfig(path=str(tmp_path / "model"), template_date="2024-02-29")
        text = PromptProcessor(model, {"thinks": False}).render_messages(MESSAGES)
        assert text.startswith(f"{'29.02.' if before else ''}off<|im_start|>")
        assert "off" not in PromptProcessor(model).render_messages(MESSAGES)
