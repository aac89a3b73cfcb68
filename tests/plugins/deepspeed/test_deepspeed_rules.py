"""Configurations that the deepspeed engine refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from asyncrl.config.schema import RunConfig

ZERO = {"engine": "deepspeed", "num_processes": 2}


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        (
            {"learner": {"deepspeed": {"zero_stage": 3}}},
            r"exists only with learner.engine=deepspeed \(it is ",
        ),
        ({"learner": ZERO, "trainer": {"mode": "sync"}}, r"deepspeed, but trainer.mode is sync"),
        ({"learner": ZERO, "model": {"dtype": "float16"}}, r"dtype is float16, whose loss scale"),
        (
            {"learner": ZERO, "model": {"lora": {"rank": 4, "modules_to_save": ["connector"]}}},
            r"modules_to_save trains weights of model.dtype .* Set learner.engine=fsdp2",
        ),
        (
            {"learner": {**ZERO, "optimizer": "adamw_8bit"}},
            r"learner.engine is deepspeed.* Set learner.engine=torch or learner.opt",
        ),
    ],
)
def test_what_it_cannot_do_is_refused_with_the_fix(
    make_config: Callable[..., RunConfig], sections: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        make_config(**sections)
