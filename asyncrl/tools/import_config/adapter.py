"""Their reward functions take a dictionary, or a list of them, and return one with `overall`. Ours take a RewardSample
and return a number. A short file between the two is written beside the configuration."""

from __future__ import annotations

from pathlib import Path

from asyncrl.tools.import_config.derived import RewardCall

_TEMPLATE = '''"""Calls {function}
as RLLaVA and EasyR1 call it. Written by `asyncrl import-config`.

A further component is a line in `reward.functions`, with weight 0 if it is only to be seen:
    {{function: {name}:component, name: accuracy, weight: 0, kwargs: {{key: accuracy}}}}
"""

from __future__ import annotations

from typing import Any

from asyncrl.rewards.sample import RewardSample
from asyncrl.rewards.spec import load_reward

theirs = load_reward({function!r})


def overall(sample: RewardSample, **kwargs: Any) -> float:
    return component(sample, "overall", **kwargs)


def component(sample: RewardSample, key: str, **kwargs: Any) -> float:
    # `response_length` (in tokens) is not known here: a function that asks for it fails, and is counted as failed.
    {row}
    {call}
    return float(scores[key])
'''
_ROW = 'row = {"response": sample.completion, "ground_truth": sample.answer}'
_CALLS = {
    "batch": (_ROW, "[scores] = theirs([row], **kwargs)"),
    "sequential": (_ROW, "scores = theirs(row, **kwargs)"),
    "pair": ("", "scores = theirs(sample.completion, sample.answer, **kwargs)"),
    "": (
        _ROW,
        'batch = theirs.__globals__.get("REWARD_TYPE", "batch") == "batch"  # how its file says that it is called\n'
        "    scores = theirs([row], **kwargs)[0] if batch else theirs(row, **kwargs)",
    ),
}


def adapter_text(function: str, path: Path, call: RewardCall) -> str:
    """The file at `path` that calls `function` (their `file.py:function`) for ours."""
    row, called = _CALLS[call]
    text = _TEMPLATE.format(function=function, name=path, row=row, call=called)
    return text.replace("    \n", "")
