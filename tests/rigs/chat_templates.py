"""Chat templates with the structure of released ones, and text models that have them.

They are written for these tests, as short as the parts that matter: how a turn ends, how results of tools are shown,
and where today's date stands.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from asyncrl.config.sections import ModelConfig
from asyncrl.demo.model import build_tokenizer
from asyncrl.processing.processor import PromptProcessor

CHATML = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
QWEN = """\
{%- for m in messages %}
{%- if m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
{%- else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
GEMMA = """\
{{- '<bos>' }}
{%- for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' }}
{{- m.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""
LLAMA = """\
{{- '<s><|head|>system<|/head|>\\n\\nToday Date: ' + strftime_now('%d %b %Y') + '<|eot_id|>' }}
{%- for m in messages %}
{%- if m.role == 'tool' %}{{ '<|head|>ipython<|/head|>\\n\\n' + m.content | tojson + '<|eot_id|>' }}
{%- else %}{{ '<|head|>' + m.role + '<|/head|>\\n\\n' + m.content | trim + '<|eot_id|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\\n\\n' }}{% endif %}"""
DEEPSEEK = """\
{%- set ns = namespace(is_tool=false, is_first=true) %}
{%- for m in messages %}
{%- if m.role == 'user' %}{% set ns.is_tool = false %}{{ '<|User|>' + m.content }}
{%- elif m.role == 'assistant' %}
{{- ('<|outputs_end|>' if ns.is_tool else '<|Assistant|>') + m.content + '</s>' }}{% set ns.is_tool = false %}
{%- elif m.role == 'tool' %}{% set ns.is_tool = true %}
{{- ('<|outputs_begin|>' if ns.is_first else '\\n') + '<|output_begin|>' + m.content + '<|output_end|>' }}
{%- set ns.is_first = false %}
{%- endif %}
{%- endfor %}
{%- if ns.is_tool %}{{ '<|outputs_end|>' }}{% elif add_generation_prompt %}{{ '<|Assistant|>' }}{% endif %}"""
DEEPSEEK_V3 = "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}\n" + DEEPSEEK
MISTRAL = """\
{{- '<s>' }}
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '[INST] ' + m.content + '[/INST]' }}
{%- elif m.role == 'assistant' %}{{ m.content + '</s>' }}
{%- else %}{{ '[TOOL_RESULTS]{"content": ' + m.content + '}[/TOOL_RESULTS]' }}{% endif %}
{%- endfor %}"""
LLAMA2 = """\
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '<s>[INST] ' + m.content + ' [/INST]' }}
{%- else %}{{ ' ' + m.content + ' </s>' }}{% endif %}
{%- endfor %}"""
COMMAND = """\
{%- for m in messages %}{{ '<|START|>' + m.role + '<|TEXT|>' + m.content + '<|END_TEXT|><|END_TURN|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|START|>assistant<|TEXT|>' }}{% endif %}"""
GLM = """\
{%- for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"""
GPT_OSS = """\
{{- '<|start|>system<|message|>Current date: ' + strftime_now('%Y-%m-%d') + '<|end|>' }}
{%- for m in messages %}
{{- '<|start|>' + m.role + '<|message|>' + m.content }}
{{- '<|return|>' if loop.last and m.role == 'assistant' and not add_generation_prompt else '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""
GEMMA_3 = """\
{{- '<bos>' }}
{%- set system = messages[0].role == 'system' %}{% set before = messages[0].content + '\\n\\n' if system else '' %}
{%- set talk = messages[1:] if system else messages %}
{%- for m in talk %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' }}
{{- (before if loop.first else '') + m.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""
LLAMA_3_2 = """\
{%- set day = date_string if date_string is defined else strftime_now('%d %b %Y') %}
{%- set system, talk = (messages[0].content, messages[1:]) if messages[0].role == 'system' else ('', messages) %}
{{- '<s><|head|>system<|/head|>\\n\\n' + ('Environment: ipython\\n' if tools else '') }}
{{- 'Today Date: ' + day + '\\n\\n' }}
{{- system + '<|eot_id|>' }}
{%- for m in talk %}
{%- if m.tool_calls is defined %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('one call at once') }}{% endif %}
{%- set call = m.tool_calls[0].function %}{{ '<|head|>assistant<|/head|>\\n\\n{"name": "' + call.name + '", ' }}
{{- '"parameters": ' + call.arguments | tojson + '}<|eot_id|>' }}
{%- elif m.role == 'tool' %}{{ '<|head|>ipython<|/head|>\\n\\n' + m.content | tojson + '<|eot_id|>' }}
{%- else %}{{ '<|head|>' + m.role + '<|/head|>\\n\\n' }}
{%- if tools and loop.first %}{{ 'Respond in the format {"name": NAME, "parameters": {}}.\\n\\n' }}
{%- for t in tools %}{{ t | tojson + '\\n\\n' }}{% endfor %}{% endif %}
{{- m.content | trim + '<|eot_id|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\\n\\n' }}{% endif %}"""
PLAIN = """\
{%- for m in messages %}{{ m.role + ': ' + m.content + '\\n\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"""
OPEN = """\
{%- for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}{{ '<|assistant|>' }}"""


def released(name: str) -> str:
    """A released template, byte for byte (`templates/README.md`)."""
    return (Path(__file__).parent / "templates" / f"{name}.jinja").read_text(encoding="utf-8")


_WRITTEN = re.findall(r"<[^ ']+?>|\[/?[A-Z_]+\]", GEMMA + LLAMA + DEEPSEEK + MISTRAL + LLAMA2 + COMMAND + GPT_OSS)
SPECIAL = sorted(
    {*_WRITTEN, *("<|call|>", "<|channel|>"), "<|im_start|>", "<eos>", "<|user|>", "<|assistant|>", "<|observation|>"}
)
"""Tokens that the templates write."""


def make_text_model(
    folder: Path,
    template: str,
    eos: str | None,
    *,
    generation: dict[str, Any] | None = None,
    described: dict[str, Any] | None = None,
    **tokenizer_settings: Any,
) -> ModelConfig:
    """A text model's small files, without weights: `eos` is the tokenizer's; the others are contents of its
    generation_config.json (None: there is none), config.json and tokenizer_config.json. Tokens are given as texts."""
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(SPECIAL, special_tokens=True)
    tokenizer.eos_token = eos
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)

    def ids(value: Any) -> Any:
        """The values with ids in the places of tokens."""
        if isinstance(value, dict):
            return {key: ids(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return list(map(ids, value))
        return tokenizer.get_vocab().get(value, value) if isinstance(value, str) else value

    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(ids(generation)))
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = {"model_type": "qwen2", "vocab_size": len(tokenizer), "num_key_value_heads": 1, **sizes}
    (folder / "config.json").write_text(json.dumps(config | ids(described or {})))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | tokenizer_settings))
    return ModelConfig(path=str(folder))


def text_processor(folder: Path, template: str, eos: str | None, **files: Any) -> PromptProcessor:
    """The processor of such a model."""
    return PromptProcessor(make_text_model(folder, template, eos, **files))
